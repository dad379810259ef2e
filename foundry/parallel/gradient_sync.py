"""When gradients are reduced over ranks, for whatever a model has become.

Every class here is a `foundry.core.protocols.Synchroniser`. What one window of M microbatches costs:

| | every | last | last_keep_params |
|---|---|---|---|
| DDP, per bucket | M all-reduces | 1 | an error: nothing is ever freed |
| FSDP2, per sharded unit | 2M all-gathers, M reduce-scatters | 2M, 1 | 1, 1 |
| memory | least | + whole fp32 gradients | + whole weights |

An FSDP2 unit that stays gathered after forward, such as the root, gathers M times instead of 2M. Outside a window, in
evaluation, every unit frees its weights after forward.
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
    """One process: its gradients are the whole ones, under every policy."""

    def microbatch(self, *, first: bool, last: bool) -> AbstractContextManager[None]:
        """Nothing to do around a microbatch."""
        return nullcontext()

    def finish(self) -> None:
        """Nothing is left to reduce."""


class DDPSync:
    """DDP, whose buckets are reduced while the backward pass runs.

    Args:
        model: a `DistributedDataParallel`, or a wrapper around one.
        policy: `every` or `last`.

    Raises:
        ConfigError: `last_keep_params`, which has nothing to keep here.
    """

    def __init__(self, model: nn.Module, policy: GradientSync) -> None:
        _refuse_keep_params(policy)
        found = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        if len(found) != 1:
            raise _cannot_act(policy, f"DDP expects one DistributedDataParallel, the model has {len(found)}")
        self._ddp, self._policy = found[0], policy

    def microbatch(self, *, first: bool, last: bool) -> AbstractContextManager[None]:
        """`no_sync` around forward and backward: DDP decides in the forward pass whether the backward pass reduces."""
        deferred = self._policy is not GradientSync.every and not last
        return _no_sync(self._ddp) if deferred else nullcontext()

    def finish(self) -> None:
        """DDP reduces everything itself, scalars included."""


class DeferredDDPSync:
    """The same average as DDP's, in one piece after the backward pass.

    Args:
        parameters: of the unwrapped model; those that need no gradient are left out.
        policy: `every` or `last`.
        world: this rank and the others.

    Raises:
        ConfigError: `last_keep_params`, which has nothing to keep here.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], policy: GradientSync, world: World) -> None:
        _refuse_keep_params(policy)
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._policy, self._world = policy, world

    @contextmanager
    def microbatch(self, *, first: bool, last: bool) -> Iterator[None]:
        """Reduce afterwards under `every`; what was averaged before stays what it is."""
        yield
        if self._policy is GradientSync.every:
            average_gradients(self._parameters, self._world)

    def finish(self) -> None:
        """Reduce the window's sum, once."""
        if self._policy is not GradientSync.every:
            average_gradients(self._parameters, self._world)


class FSDPSync:
    """FSDP2 and HSDP, and DDP with a sharded optimizer.

    `set_is_last_backward` stays true: under `every` a microbatch then waits for its reductions on the device only, and
    false would leave the order of prefetching of one microbatch to the next.

    Args:
        model: what `fully_shard` was applied to, or a wrapper around it such as `torch.compile`'s.
        policy: any.
        world: this rank and the others.
        replicated: parameters that FSDP2 ignores; their gradients are averaged at the end of a window.
        reshard_after_forward: what the blocks do between a forward and a backward pass, unless weights are kept.
        keep_params: keep weights gathered through a window under every policy, as DDP does.

    Raises:
        ConfigError: no sharded module can be found.
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
            raise _cannot_act(policy, "the model has no module sharded by FSDP2")
        self._root = self._units[0]
        self._policy = policy
        self._world = world
        self._replicated = [parameter for parameter in replicated if parameter.requires_grad]
        self._reshard_after_forward = reshard_after_forward
        self._keep_params = keep_params or policy is GradientSync.last_keep_params
        self._leave_window()

    @contextmanager
    def microbatch(self, *, first: bool, last: bool) -> Iterator[None]:
        """Reduce in this backward pass or not; keep what is gathered until the window's last one."""
        self._root.set_requires_gradient_sync(last or self._policy is GradientSync.every)
        self._root.set_reshard_after_backward(last or not self._keep_params)
        if first:
            self._root.set_reshard_after_forward(self._reshard_after_forward and not self._keep_params)
            # The root's backward pass comes next and needs its weights.
            self._root.set_reshard_after_forward(False, recurse=False)
        yield
        if last:
            self._leave_window()

    def finish(self) -> None:
        """Average what FSDP2 does not shard."""
        average_gradients(self._replicated, self._world)

    def _leave_window(self) -> None:
        """Outside a window nothing stays gathered: it would be stale once the weights are changed in place."""
        self._root.set_reshard_after_forward(True)


@torch.no_grad()
def average_gradients(parameters: Sequence[nn.Parameter], world: World) -> None:
    """Replace each gradient by its mean over the ranks that divide the data: one all-reduce per device and type.

    A rank without a gradient contributes zeros, so that every rank takes part and ends with the same.
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
        raise _cannot_act(policy, "DDP never frees weights, so there are none to keep; use last")


def _cannot_act(policy: GradientSync, why: str) -> ConfigError:
    return ConfigError(Violation("distributed.gradient_sync", f"is {policy.value} but cannot act: {why}"))
