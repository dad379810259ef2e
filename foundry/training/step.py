"""The optimizer step.

An objective returns the number of valid items of a microbatch before the forward pass, and then a loss that is summed
over these items. The step divides the loss by the number of valid items of all microbatches and ranks, so the update
does not depend on gradient accumulation or on the number of ranks. Without valid items the loss is exactly 0. Metrics
are sums with their own counts, reduced in the same collective as the loss.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from foundry.config.metrics import declared_metrics
from foundry.config.schemas.guard import Guard
from foundry.core.errors import ConfigError, Violation
from foundry.core.protocols import HOST_ENTRIES, LossSum, Mean, Microbatch, Objective, Synchroniser, Window
from foundry.parallel.grad_norm import clip_grad_norm_
from foundry.parallel.precision import PrecisionPolicy
from foundry.parallel.process_group import World
from foundry.training.block_norms import BlockNorms, NormsByBlock
from foundry.training.guards import Attempt, UpdateGuard
from foundry.training.metric_sums import add_metrics, reduce_sums


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step; all values are over the whole global batch and stay on the device.

    Attributes:
        loss: () float32, mean over the valid items.
        grad_norm: () float32, before clipping.
        metrics: sums and counts by name.
        skipped: True if the update was skipped and the run continues; a () bool tensor if the guard decides on the
            device.
        norms: norms by block; None in steps that are not measured.
    """

    loss: Tensor
    grad_norm: Tensor
    metrics: dict[str, Mean]
    skipped: Tensor | bool = False
    norms: NormsByBlock | None = None


ForwardBackward = Callable[[Sequence[Microbatch], Sequence[int], Tensor | float], LossSum]
"""Forward and backward passes of a window: takes microbatches, their numbers of valid items, and a factor for the loss.

The factor turns a sum over this rank's items into its share of the gradient that the synchronization averages. The
function leaves the gradients in the parameters, multiplied by the scale of the loss scaler if there is one, and returns
this rank's sums of loss and metrics, unscaled.
"""


class TrainStep:
    """One optimizer step; `__call__` reads as the algorithm."""

    def __init__(
        self,
        *,
        model: nn.Module,
        objective: Objective,
        optimizers: Sequence[Optimizer],
        sync: Synchroniser,
        precision: PrecisionPolicy,
        world: World,
        max_grad_norm: float | None,
        guard: Guard | None = None,
        forward_backward: ForwardBackward | None = None,
        norms: BlockNorms | None = None,
    ) -> None:
        """Create the step.

        Args:
            model: the wrapped model.
            objective: the loss.
            optimizers: optimizers that together cover the trainable parameters.
            sync: gradient synchronization policy.
            precision: precision policy.
            world: process group of the run.
            max_grad_norm: maximum global gradient norm; None disables clipping.
            guard: guard settings; None ends the run at the first non-finite value.
            forward_backward: replaces the loop over microbatches, for example by a pipeline; None runs one microbatch
                after the other.
            norms: measures norms by block in some steps; None disables it.
        """
        self.model, self.objective, self._optimizers = model, objective, optimizers
        self._sync, self._precision, self._world = sync, precision, world
        self._max_norm = math.inf if max_grad_norm is None else max_grad_norm
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._scaler = precision.scaler(world.device)
        self._metrics = declared_metrics(objective)
        self._forward_backward = forward_backward or self._accumulate
        self._norms = norms
        self.guard = UpdateGuard(guard or Guard(), optimizers, world, scaler=self._scaler)

    def __call__(
        self, window: Window, lr: float, step: int, *, weight_decay: float | None = None, momentum: float | None = None
    ) -> StepResult:
        """Update the model once.

        Args:
            window: this rank's microbatches of the global batch.
            lr: learning rate of this update.
            step: step number, for messages.
            weight_decay: weight decay of this update; None keeps the optimizers' own.
            momentum: momentum of this update; None keeps the optimizers' own.

        Raises:
            NonFiniteError: the loss or gradient is NaN or infinite in more consecutive steps than `guard` allows. If
                the guard decides on the device, this update and all later ones are skipped there, and the error is
                raised by the next logged step at the latest, so that this call does not synchronize.
            LossSpike: the loss jumped, and the run should go back to the last checkpoint.
            PersistentSpikeError: the loss jumped in more consecutive steps than `guard` allows.
        """
        set_schedule(self._optimizers, lr, weight_decay, momentum)
        sums, count = self._compute_gradients(window.microbatches)
        if self._scaler is not None:
            for optimizer in self._optimizers:
                self._scaler.unscale_(optimizer)
        norms = self._norms if self._norms is not None and self._norms.is_due(step) else None
        snapshot = None if norms is None else norms.before_update()
        grad_norm = clip_grad_norm_(self._parameters, self._max_norm)
        total = reduce_sums(sums, self._metrics, self._world)
        result = StepResult(total.loss / count, grad_norm, total.metrics)
        positions = [microbatch["position"] for microbatch in window.microbatches if "position" in microbatch]
        skipped = self._update(Attempt(step, result.loss, grad_norm, sums.loss, positions))
        by_block = None if norms is None or snapshot is None else norms.after_update(snapshot)
        return replace(result, skipped=skipped, norms=by_block)

    def discard_gradients(self, microbatches: Sequence[Microbatch]) -> None:
        """Compute and reduce the gradients of a window, then discard them without an update.

        Args:
            microbatches: this rank's microbatches; every rank must pass the same number.
        """
        self._compute_gradients(microbatches)
        for parameter in self._parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the guard and of the loss scaler as plain JSON."""
        return {
            "guard": self.guard.state_dict(),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`."""
        self.guard.load_state_dict(state["guard"])
        if self._scaler is not None and state["scaler"] is not None:
            self._scaler.load_state_dict(state["scaler"])

    def _compute_gradients(self, microbatches: Sequence[Microbatch]) -> tuple[LossSum, Tensor | int]:
        """Accumulate a window's gradients; return this rank's sums, and the number of valid items on all ranks."""
        num_valid = [self.objective.num_valid(microbatch) for microbatch in microbatches]
        count = self._global_count(sum(num_valid))
        # The factor contains `dp_size`, because DDP and FSDP2 average gradients, while the loss is a sum over ranks.
        with self._precision.window(self._world.device):
            sums = self._forward_backward(microbatches, num_valid, self._world.dp_size / count)
        self._sync.finish()
        return sums, count

    def _update(self, attempt: Attempt) -> Tensor | bool:
        """Step the optimizers unless the guard skips the update; return whether it was skipped."""
        try:
            is_skipped = self.guard.should_skip(attempt)
            if isinstance(is_skipped, Tensor):
                found_inf = is_skipped.float()
                for optimizer in self._optimizers:
                    optimizer.grad_scale, optimizer.found_inf = None, found_inf  # type: ignore[attr-defined]
                    optimizer.step()
                return is_skipped if self.guard.skips_on_device else False
            return is_skipped or not self._step()
        finally:
            if self._scaler is not None:
                self._scaler.update()
            for optimizer in self._optimizers:
                optimizer.zero_grad()

    def _step(self) -> bool:
        """Update the weights; return False if a gradient overflowed in fp16, so that the scale has to be lowered."""
        if self._scaler is not None:
            return all(self._scaler.step(optimizer) for optimizer in self._optimizers)
        for optimizer in self._optimizers:
            optimizer.step()
        return True

    def _global_count(self, count: int) -> Tensor | int:
        """Return the number of valid items of the whole global batch, at least 1, from this rank's number."""
        if self._world.dp_size == 1:
            return max(count, 1)
        # A fill, unlike a copy from the host, does not synchronize with the device.
        total = torch.full((), float(count), dtype=torch.float64, device=self._world.device)
        return self._world.dp_sum(total).clamp_(min=1).float()

    def _accumulate(
        self, microbatches: Sequence[Microbatch], num_valid: Sequence[int], scale: Tensor | float
    ) -> LossSum:
        """Run forward and backward microbatch by microbatch; see `ForwardBackward`."""
        loss: Tensor | None = None
        metrics: dict[str, Mean] = {}
        last = len(microbatches) - 1
        for index, microbatch in enumerate(microbatches):
            on_device = to_device(microbatch, self._world.device)
            with self._sync.microbatch(first=index == 0, last=index == last):
                with self._precision.autocast(self._world.device):
                    part = _require_sum(self.objective.loss(self.model, on_device), self.objective)
                total = part.loss * scale
                scaled = total if self._scaler is None else self._scaler.scale(total)
                torch.autograd.backward(scaled)
            loss = part.loss.detach() if loss is None else loss + part.loss.detach()
            add_metrics(metrics, part.metrics, num_valid[index])
        assert loss is not None, "a window holds at least one microbatch"
        return LossSum(loss, metrics)


def _require_sum(result: Any, objective: Objective) -> LossSum:
    """Return the result of an objective's `loss`.

    Raises:
        ConfigError: it is no `LossSum`, or its loss is not a single number with a gradient.
    """
    if not isinstance(result, LossSum):
        problem = f"an object of type {type(result).__name__}"
    elif result.loss.ndim:
        problem = f"losses of shape {tuple(result.loss.shape)}"
    elif not result.loss.requires_grad:
        problem = "a loss without a gradient"
    else:
        return result
    message = (
        f"builds {type(objective).__name__}, whose loss() returns {problem} but must return a LossSum of "
        "foundry.core.protocols, with the sum over the valid items"
    )
    raise ConfigError(Violation("objective._target_", message))


def set_schedule(
    optimizers: Iterable[Optimizer], lr: float, weight_decay: float | None = None, momentum: float | None = None
) -> None:
    """Set the values of each parameter group for the next update.

    Args:
        optimizers: optimizers whose groups are changed.
        lr: learning rate; multiplied by `lr_mult` of the group.
        weight_decay: weight decay; multiplied by `wd_mult` of the group. None keeps the groups' values.
        momentum: momentum of the groups that have one. None keeps the groups' values.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
            if weight_decay is not None:
                group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)
            if momentum is not None and "momentum" in group:
                group["momentum"] = momentum


def to_device(microbatch: Microbatch, device: torch.device) -> Microbatch:
    """Move a microbatch to the device, except the entries that stay in host memory."""
    if device.type == "cpu":
        return microbatch
    return {k: v if k in HOST_ENTRIES else v.to(device, non_blocking=True) for k, v in microbatch.items()}
