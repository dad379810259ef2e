"""Gradient synchronization policies for every kind of model wrapper.

Each class here is a `foundry.core.protocols.Synchroniser`. Cost of one window of M microbatches:

| | every | last | last_keep_params |
|---|---|---|---|
| DDP, per bucket | M all-reduces | 1 | an error: nothing is ever freed |
| FSDP2, per sharded unit | 2M all-gathers, M reduce-scatters | 2M, 1 | 1, 1 |
| memory | least | + whole fp32 gradients | + whole weights |

An FSDP2 unit that stays gathered after its forward pass, such as the root, needs M all-gathers instead of 2M. Outside a
window, as in evaluation, every unit frees its weights after its forward pass.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from foundry.config.schemas.distributed import GradientSync
from foundry.core.errors import ConfigError, Violation
from foundry.core.sharded import sharded_modules
from foundry.parallel.process_group import World


class LocalSync:
    """Synchronization for a single process: its gradients are complete under every policy."""

    def microbatch(self, *, first: bool, last: bool) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def finish(self) -> None:
        """Do nothing; no reduction is pending."""


class DDPSync:
    """DDP with buckets that are reduced during the backward pass.

    Args:
        model: a `DistributedDataParallel`, or a wrapper around one.
        policy: `every` or `last`.

    Raises:
        ConfigError: the policy is `last_keep_params`; DDP never frees weights.
    """

    def __init__(self, model: nn.Module, policy: GradientSync) -> None:
        _refuse_keep_params(policy)
        ddp_modules = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        if len(ddp_modules) != 1:
            raise _no_effect_error(
                policy, f"DDP requires one DistributedDataParallel module, but the model has {len(ddp_modules)}"
            )
        self._ddp, self._policy = ddp_modules[0], policy

    def microbatch(self, *, first: bool, last: bool) -> AbstractContextManager[None]:
        """Return DDP's `no_sync` context if the reduction is deferred; otherwise a context that does nothing.

        The context must cover the forward pass too, because that decides whether the backward pass reduces.
        """
        deferred = self._policy is not GradientSync.every and not last
        return _no_sync(self._ddp) if deferred else nullcontext()

    def finish(self) -> None:
        """Do nothing; DDP reduces all gradients itself, scalars included."""


class DeferredDDPSync:
    """The same average of gradients as DDP's, computed by all-reduces after the backward pass, without overlap.

    Args:
        parameters: parameters of the unwrapped model; those without `requires_grad` are ignored.
        policy: `every` or `last`.
        world: the ranks.

    Raises:
        ConfigError: the policy is `last_keep_params`; DDP never frees weights.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], policy: GradientSync, world: World) -> None:
        _refuse_keep_params(policy)
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._policy, self._world = policy, world

    @contextmanager
    def microbatch(self, *, first: bool, last: bool) -> Iterator[None]:
        """Return a context that averages the gradients at its end under `every`, and does nothing under `last`.

        Averaging the accumulated gradients again does not change the averages of earlier microbatches.
        """
        yield
        if self._policy is GradientSync.every:
            average_gradients(self._parameters, self._world)

    def finish(self) -> None:
        """Average the window's accumulated gradients over the ranks, unless the policy is `every`."""
        if self._policy is not GradientSync.every:
            average_gradients(self._parameters, self._world)


class FSDPSync:
    """FSDP2, HSDP, and DDP with a sharded optimizer.

    FSDP2's `set_is_last_backward` stays true: under `every`, a microbatch then waits for its reductions on the device
    only, and false would carry one microbatch's prefetch order over to the next.

    Args:
        model: the module that `fully_shard` was applied to, or a wrapper around it such as that of `torch.compile`.
        policy: any policy.
        world: the ranks.
        replicated: parameters that FSDP2 ignores; their gradients are averaged at the end of a window.
        reshard_after_forward: free the weights of blocks between forward and backward pass, unless weights are kept
            through the window.
        keep_params: keep weights gathered through a window under every policy, as DDP does.

    Raises:
        ConfigError: the model has no sharded module.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: GradientSync,
        world: World,
        *,
        replicated: Sequence[nn.Parameter] = (),
        reshard_after_forward: bool = True,
        keep_params: bool = False,
    ) -> None:
        self._units = sharded_modules(model)
        if not self._units:
            raise _no_effect_error(policy, "the model has no module sharded by FSDP2")
        self._root = self._units[0]
        self._policy = policy
        self._world = world
        self._replicated = [parameter for parameter in replicated if parameter.requires_grad]
        self._reshard_after_forward = reshard_after_forward
        self._keep_params = keep_params or policy is GradientSync.last_keep_params
        self._leave_window()

    @contextmanager
    def microbatch(self, *, first: bool, last: bool) -> Iterator[None]:
        """Return a context that sets whether the backward pass reduces gradients and whether gathered weights are kept.

        Weights are kept until the window's last microbatch under `last_keep_params`, or if `keep_params` is True.
        """
        self._root.set_requires_gradient_sync(last or self._policy is GradientSync.every)
        self._root.set_reshard_after_backward(last or not self._keep_params)
        if first:
            self._root.set_reshard_after_forward(self._reshard_after_forward and not self._keep_params)
            # The root's backward pass follows its forward pass immediately and needs the same weights.
            self._root.set_reshard_after_forward(False, recurse=False)
        yield
        if last:
            self._leave_window()

    def finish(self) -> None:
        """Average the gradients of parameters that FSDP2 does not shard."""
        average_gradients(self._replicated, self._world)

    def _leave_window(self) -> None:
        """Keep no weights gathered outside a window: they would be stale after an in-place update of the shards."""
        self._root.set_reshard_after_forward(True)


@torch.no_grad()
def average_gradients(parameters: Sequence[nn.Parameter], world: World) -> None:
    """Replace each gradient by its mean over the data-parallel ranks, with one all-reduce per device and dtype.

    A rank without a gradient contributes zeros, so that every rank takes part and gets the same result.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        groups.setdefault((parameter.device, parameter.grad.dtype), []).append(parameter)
    for members in groups.values():
        grads = [member.grad for member in members if member.grad is not None]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=world.dp_group)
        flat /= world.dp_size
        torch._foreach_copy_(grads, _split_like(flat, grads))


def _split_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


@contextmanager
def _no_sync(ddp: DistributedDataParallel) -> Iterator[None]:
    with ddp.no_sync():
        yield


def _refuse_keep_params(policy: GradientSync) -> None:
    if policy is GradientSync.last_keep_params:
        raise _no_effect_error(policy, "DDP never frees weights, so there are none to keep; use last")


def _no_effect_error(policy: GradientSync, reason: str) -> ConfigError:
    return ConfigError(Violation("distributed.gradient_sync", f"is {policy.value} but has no effect: {reason}"))
