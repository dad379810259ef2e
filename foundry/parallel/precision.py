"""The arithmetic of a run, the same under one process, DDP and FSDP2.

Under the amp modes every wrapper computes with autocast on fp32 parameters. FSDP2 additionally gathers the matrices of
the blocks in the compute type, which halves its traffic and changes no result: autocast would round exactly those
numbers in exactly that way. What autocast reads in fp32 (embeddings, norm weights) FSDP2 does not round either.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from foundry.config.schemas.precision import Precision, PrecisionMode
from foundry.core.errors import ConfigError, Violation
from foundry.core.sharded import local_part
from foundry.parallel.device import computes_bf16, device_name

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

_COMPUTE_DTYPES = {
    PrecisionMode.amp_bfloat16: torch.bfloat16,
    PrecisionMode.pure_bf16: torch.bfloat16,
    PrecisionMode.fp32: torch.float32,
    PrecisionMode.amp_float16: torch.float16,
}


@contextmanager
def fp32_arithmetic(*, tf32: bool) -> Iterator[None]:
    """Have GPUs compute fp32 matrix products and convolutions alike in the body: both in TF32, or both in fp32.

    Torch's default is TF32 for convolutions only. Its older switches are used, since reading them raises an error once
    the newer ones (`fp32_precision`) have been set. https://docs.pytorch.org/docs/stable/notes/cuda.html

    Args:
        tf32: `precision.tf32` of the run.
    """
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = tf32
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


class PrecisionPolicy:
    """What weights, compute and gradient reduction are held in.

    Attributes:
        mode: the user's choice.
        compute_dtype: what matrices are multiplied in.
        is_amp: fp32 weights, another type of compute.
    """

    def __init__(self, mode: PrecisionMode) -> None:
        self.mode = mode
        self.compute_dtype = _COMPUTE_DTYPES[mode]
        self.is_amp = mode in (PrecisionMode.amp_bfloat16, PrecisionMode.amp_float16)

    @classmethod
    def from_config(cls, config: Precision, device: torch.device) -> "PrecisionPolicy":
        """The policy of a `precision=` choice on this device.

        Raises:
            ConfigError: the device has no arithmetic of that type.
        """
        policy = cls(config.mode)
        if policy.compute_dtype is torch.bfloat16 and not computes_bf16(device):
            message = (
                f"is {config.mode.value} but {device_name(device)} does not compute in bf16; choose amp_float16 or fp32"
            )
            raise ConfigError(Violation("precision", message))
        return policy

    def prepare(self, model: nn.Module, frozen: Iterable[nn.Parameter] = ()) -> nn.Module:
        """Bring parameters and buffers to the type they are held in; call it before the optimizer is built.

        pure_bf16 casts them, and from then on what the model is called with. The other modes need fp32 parameters and
        leave the model alone, but for those of `frozen`: matrices that autocast would round each time, and amp holds
        rounded.
        """
        for parameter in frozen if self.is_amp else ():
            parameter.data = parameter.data.to(self.compute_dtype)
        if self.mode is PrecisionMode.pure_bf16:
            model.to(torch.bfloat16)
            model.register_forward_pre_hook(cast_inputs, with_kwargs=True)
        return model

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """The context of a forward pass on `device`; the backward pass runs outside it."""
        return torch.autocast(device.type, dtype=self.compute_dtype) if self.is_amp else nullcontext()

    @contextmanager
    def window(self, device: torch.device) -> Iterator[None]:
        """Enter the context of all passes of a window, in which autocast rounds each weight once.

        torch empties the cache of rounded weights when the outermost autocast context of a thread ends, an inactive one
        too. On CUDA the backward pass would run in the device's own thread, in which checkpointing enters autocast as
        the outermost context: each recomputed block would empty the cache. So it runs in the calling thread. Nothing
        is lost by that, since a process computes on one device.
        """
        if not self.is_amp:
            yield
            return
        with torch.autocast(device.type, enabled=False), torch.autograd.set_multithreading_enabled(False):
            yield

    def is_replicated(self, parameter: nn.Parameter, *, in_block: bool) -> bool:
        """Whether FSDP2 leaves this parameter whole on every rank, its gradient averaged once a window.

        Scalars cannot be sharded. Norm weights and biases of a block must not be rounded with its matrices under amp;
        they are a few thousandths of a model.
        """
        return parameter.ndim == 0 or (self.is_amp and in_block and parameter.ndim == 1)

    def fsdp_policy(self, *, root: bool = False) -> "MixedPrecisionPolicy":
        """What FSDP2 gathers and reduces in, for a block or for the root, which holds embeddings and the head."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        if not self.is_amp:
            return MixedPrecisionPolicy(cast_forward_inputs=False)
        # Autocast casts what it multiplies; casting inputs here as well would round masks, timesteps and residuals.
        param_dtype = None if root else self.compute_dtype
        return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)

    def scaler(self, device: torch.device) -> "LossScaler | None":
        """The loss scaler that amp_float16 needs; None in the other modes, whose exponent range is that of fp32."""
        return LossScaler(device) if self.mode is PrecisionMode.amp_float16 else None


class LossScaler:
    """Dynamic loss scaling (Micikevicius et al. 2018, section 3.2) for plain and DTensor gradients.

    It speaks as `torch.amp.GradScaler` does: scale, unscale_, step, update. That one fails on gradients of which only
    some are DTensors, and decides per rank; here a gradient that is infinite on one rank skips the step on all.

    Args:
        device: where the scale lives.
        init_scale: first factor on the loss.
        growth_interval: steps without an infinity after which the factor doubles.
    """

    def __init__(self, device: torch.device, *, init_scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        self._scale = torch.full((), init_scale, dtype=torch.float32, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._growth_interval = growth_interval
        self._unscaled: set[int] = set()
        self.found_inf: Tensor | None = None
        """() float32, 1 where a gradient unscaled since the last update() was not finite; equal on all ranks."""

    def get_scale(self) -> float:
        """The current factor; reads the device."""
        return float(self._scale.item())

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` times the factor, for the backward pass."""
        return loss * self._scale

    @torch.no_grad()
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the factor, once a step and before clipping, without reading the device."""
        assert id(optimizer) not in self._unscaled, "the gradients are unscaled already"
        self._unscaled.add(id(optimizer))
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        inverse = self._scale.double().reciprocal().float()
        found = torch.zeros_like(self._scale)
        for grads in _local_grads(parameters):
            found_here = torch.zeros((), device=grads[0].device)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found_here, inverse.to(grads[0].device))
            found = torch.maximum(found, found_here.to(found.device))
        if dist.is_initialized():
            dist.all_reduce(found, dist.ReduceOp.MAX)
        self.found_inf = found if self.found_inf is None else torch.maximum(self.found_inf, found)

    def step(self, optimizer: Optimizer) -> bool:
        """Update the weights unless a gradient is not finite; say whether it was done. Reads the device once.

        With several optimizers unscale_ the gradients of all of them first: then none steps where one must not.
        """
        if id(optimizer) not in self._unscaled:
            self.unscale_(optimizer)
        assert self.found_inf is not None
        if self.found_inf.item():
            return False
        optimizer.step()
        return True

    @torch.no_grad()
    def update(self) -> None:
        """Halve the factor after an infinity; double it after `growth_interval` steps without one."""
        assert self.found_inf is not None, "update() follows unscale_() or step()"
        bad = self.found_inf > 0
        good_steps = torch.where(bad, 0, self._good_steps + 1)
        grow = good_steps >= self._growth_interval
        self._scale.mul_(torch.where(bad, 0.5, torch.where(grow, 2.0, 1.0)))
        self._good_steps.copy_(torch.where(grow, 0, good_steps))
        self.found_inf = None
        self._unscaled.clear()

    def state_dict(self) -> dict[str, Any]:
        """The factor and the number of good steps at it."""
        return {"scale": self._scale.item(), "good_steps": self._good_steps.item()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self._scale.fill_(state["scale"])
        self._good_steps.fill_(state["good_steps"])


def _local_grads(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """This rank's part of each gradient, by device and type; writing to it writes to the gradient."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            grad = local_part(parameter.grad)
            groups.setdefault((grad.device, grad.dtype), []).append(grad)
    return list(groups.values())


def cast_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A forward pre-hook: floating-point arguments in bfloat16, everything else as it is."""

    def cast(value: Any) -> Any:
        return value.to(torch.bfloat16) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(cast(value) for value in args), {name: cast(value) for name, value in kwargs.items()}
