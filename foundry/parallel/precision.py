"""Numerical precision of a run, the same for one process, DDP and FSDP2.

In the amp modes every wrapper uses autocast with fp32 parameters. FSDP2 also gathers the matrices of the blocks in the
compute dtype, which halves its traffic and does not change results: autocast would round the same values in the same
way. Values that autocast reads in fp32 (embeddings, norm weights) are not rounded by FSDP2 either.
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
    """Use the same format for fp32 matrix products and convolutions on GPUs inside the context: TF32 or fp32.

    Torch's default is TF32 for convolutions only. This uses torch's older switches, because reading them raises an
    error once the newer ones (`fp32_precision`) have been set. https://docs.pytorch.org/docs/stable/notes/cuda.html

    Args:
        tf32: `precision.tf32` of the run.
    """
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    previous = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = tf32
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = previous


class PrecisionPolicy:
    """Dtypes of weights, compute and gradient reduction.

    Attributes:
        mode: the configured mode.
        compute_dtype: dtype of matrix products.
        is_amp: whether weights are fp32 and matrix products use another dtype (amp_bfloat16, amp_float16).
    """

    def __init__(self, mode: PrecisionMode) -> None:
        self.mode = mode
        self.compute_dtype = _COMPUTE_DTYPES[mode]
        self.is_amp = mode in (PrecisionMode.amp_bfloat16, PrecisionMode.amp_float16)

    @classmethod
    def from_config(cls, config: Precision, device: torch.device) -> "PrecisionPolicy":
        """Return the policy of the configured precision on this device.

        Raises:
            ConfigError: the device does not support the compute dtype.
        """
        policy = cls(config.mode)
        if policy.compute_dtype is torch.bfloat16 and not computes_bf16(device):
            message = (
                f"is {config.mode.value} but {device_name(device)} does not support bf16; choose amp_float16 or fp32"
            )
            raise ConfigError(Violation("precision", message))
        return policy

    def prepare(self, model: nn.Module, frozen: Iterable[nn.Parameter] = ()) -> nn.Module:
        """Cast parameters and buffers to their storage dtype; call before the optimizer is built.

        pure_bf16 casts the model to bf16, and its inputs in each forward pass. The other modes need fp32 parameters and
        do not change the model, except that amp stores the parameters in `frozen` in the compute dtype, because
        autocast would round them in every pass.
        """
        for parameter in frozen if self.is_amp else ():
            parameter.data = parameter.data.to(self.compute_dtype)
        if self.mode is PrecisionMode.pure_bf16:
            model.to(torch.bfloat16)
            model.register_forward_pre_hook(cast_inputs, with_kwargs=True)
        return model

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context of a forward pass on `device`; run the backward pass outside it."""
        return torch.autocast(device.type, dtype=self.compute_dtype) if self.is_amp else nullcontext()

    @contextmanager
    def window(self, device: torch.device) -> Iterator[None]:
        """Make autocast round each weight only once per window; the context covers all passes of a window.

        torch clears the cache of rounded weights when the outermost autocast context of a thread exits, even a disabled
        one. On CUDA the backward pass would run in the device's own thread. Activation checkpointing would enter
        autocast there as the outermost context, so each recomputed block would clear the cache. The backward pass
        therefore runs in the calling thread. This costs nothing, because a process computes on one device.
        """
        if not self.is_amp:
            yield
            return
        with torch.autocast(device.type, enabled=False), torch.autograd.set_multithreading_enabled(False):
            yield

    def is_replicated(self, parameter: nn.Parameter, *, in_block: bool) -> bool:
        """Return whether FSDP2 leaves this parameter unsharded, so that its gradient is averaged once per window.

        Scalars cannot be sharded. With amp, norm weights and biases of a block must not be rounded with its matrices;
        these vectors are a few thousandths of a model's parameters.
        """
        return parameter.ndim == 0 or (self.is_amp and in_block and parameter.ndim == 1)

    def fsdp_policy(self, *, root: bool = False) -> "MixedPrecisionPolicy":
        """Return FSDP2's gather and reduce dtypes for a block, or for the root, which holds embeddings and head."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        if not self.is_amp:
            return MixedPrecisionPolicy(cast_forward_inputs=False)
        # Autocast casts the inputs of matrix products; casting all inputs here would also round masks, timesteps and
        # residuals.
        param_dtype = None if root else self.compute_dtype
        return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)

    def scaler(self, device: torch.device) -> "LossScaler | None":
        """Return the loss scaler of amp_float16; None in the other modes, whose exponent range equals that of fp32."""
        return LossScaler(device) if self.mode is PrecisionMode.amp_float16 else None


class LossScaler:
    """Dynamic loss scaling (Micikevicius et al. 2018, section 3.2) for plain and DTensor gradients.

    The interface is that of `torch.amp.GradScaler`: scale, unscale_, step, update. GradScaler fails if only some
    gradients are DTensors, and decides per rank; here a non-finite gradient on one rank skips the step on all ranks.

    Args:
        device: device of the scale.
        init_scale: initial scale of the loss.
        growth_interval: number of consecutive steps with finite gradients after which the scale doubles.
    """

    def __init__(self, device: torch.device, *, init_scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        self._scale = torch.full((), init_scale, dtype=torch.float32, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._growth_interval = growth_interval
        self._unscaled: set[int] = set()
        self.found_inf: Tensor | None = None
        """() float32, 1 if any gradient unscaled since the last update() was not finite; equal on all ranks. None if
        no gradient was unscaled since then."""

    def get_scale(self) -> float:
        """Return the current scale; synchronizes with the device."""
        return float(self._scale.item())

    def scale(self, loss: Tensor) -> Tensor:
        """Return `loss` times the scale, for the backward pass."""
        return loss * self._scale

    @torch.no_grad()
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, once a step, before clipping, without a synchronization."""
        assert id(optimizer) not in self._unscaled, "the gradients are unscaled already"
        self._unscaled.add(id(optimizer))
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        inverse = self._scale.double().reciprocal().float()
        is_non_finite = torch.zeros_like(self._scale)
        for grads in _local_grads(parameters):
            is_device_non_finite = torch.zeros((), device=grads[0].device)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, is_device_non_finite, inverse.to(grads[0].device))
            is_non_finite = torch.maximum(is_non_finite, is_device_non_finite.to(is_non_finite.device))
        if dist.is_initialized():
            dist.all_reduce(is_non_finite, dist.ReduceOp.MAX)
        self.found_inf = is_non_finite if self.found_inf is None else torch.maximum(self.found_inf, is_non_finite)

    def step(self, optimizer: Optimizer) -> bool:
        """Update the weights unless a gradient is not finite; return whether they were updated. Synchronizes once.

        With several optimizers, call unscale_ for every optimizer first: then either all optimizers step, or none does.
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
        """Halve the scale after a non-finite gradient; double it after `growth_interval` steps without one."""
        assert self.found_inf is not None, "update() follows unscale_() or step()"
        is_non_finite = self.found_inf > 0
        good_steps = torch.where(is_non_finite, 0, self._good_steps + 1)
        grow = good_steps >= self._growth_interval
        self._scale.mul_(torch.where(is_non_finite, 0.5, torch.where(grow, 2.0, 1.0)))
        self._good_steps.copy_(torch.where(grow, 0, good_steps))
        self.found_inf = None
        self._unscaled.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the number of steps without a non-finite gradient since the scale last changed."""
        return {"scale": self._scale.item(), "good_steps": self._good_steps.item()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scale and the number of steps from a `state_dict()`."""
        self._scale.fill_(state["scale"])
        self._good_steps.fill_(state["good_steps"])


def _local_grads(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return this rank's shard of each gradient, grouped by device and dtype; the shards are views."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            grad = local_part(parameter.grad)
            groups.setdefault((grad.device, grad.dtype), []).append(grad)
    return list(groups.values())


def cast_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook that casts floating-point tensor arguments to bfloat16."""

    def cast(value: Any) -> Any:
        return value.to(torch.bfloat16) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(cast(value) for value in args), {name: cast(value) for name, value in kwargs.items()}
