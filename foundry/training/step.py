"""One optimizer step."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from foundry.config.metrics import declared_metrics
from foundry.config.schemas.guard import Guard
from foundry.core.protocols import HOST_ENTRIES, LossSum, Mean, Microbatch, Objective, Synchroniser, Window
from foundry.parallel.grad_norm import clip_grad_norm_
from foundry.parallel.precision import PrecisionPolicy
from foundry.parallel.process_group import World
from foundry.training.block_norms import BlockNorms, NormsByBlock
from foundry.training.guards import Attempt, UpdateGuard
from foundry.training.metric_sums import add_metrics, reduce_sums


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step saw; everything is over the whole global batch and stays on the device.

    Attributes:
        loss: () float32, the mean over valid items.
        grad_norm: () float32, before clipping.
        metrics: sums and counts by name.
        skipped: whether the update was left out, and the run continues; a () bool tensor where only the device knows.
        norms: by block, in the steps in which they are measured.
    """

    loss: Tensor
    grad_norm: Tensor
    metrics: dict[str, Mean]
    skipped: Tensor | bool = False
    norms: NormsByBlock | None = None


ForwardBackward = Callable[[Sequence[Microbatch], Sequence[int], Tensor | float], LossSum]
"""Forward and backward passes of a window: its microbatches, the valid items of each, and the factor of the loss.

The factor makes a sum over this rank's items a share of the gradient that the synchronisation averages. Gradients are
left in the parameters, times the loss scaler's scale where there is one; the answer is this rank's sums, unscaled.
"""


class TrainStep:
    """The optimizer step: its order is the algorithm."""

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
        """Put the parts together.

        Args:
            model: as it was wrapped.
            objective: what is minimised.
            optimizers: together they cover the trainable parameters.
            sync: when gradients are reduced.
            precision: the arithmetic of the run.
            world: this rank and the others.
            max_grad_norm: largest global norm of the gradient; None: no clipping.
            guard: what to do at a fault; None: what is not finite ends the run.
            forward_backward: another way through a window, such as a pipeline; None: one microbatch after the other.
            norms: measures blocks in some of the steps; None: in none.
        """
        self._model, self._objective, self._optimizers = model, objective, optimizers
        self._sync, self._precision, self._world = sync, precision, world
        self._max_norm = math.inf if max_grad_norm is None else max_grad_norm
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._scaler = precision.scaler(world.device)
        self._metrics = declared_metrics(objective)
        self._forward_backward = forward_backward or self._accumulate
        self._norms = norms
        self.guard = UpdateGuard(guard or Guard(), optimizers, world, scaler=self._scaler)

    def __call__(self, window: Window, lr: float, step: int, *, weight_decay: float | None = None) -> StepResult:
        """Update the model once.

        Args:
            window: this rank's microbatches of the global batch.
            lr: the learning rate of this update.
            step: the number of this step, for messages.
            weight_decay: of this update; None: the optimizers' own.

        Raises:
            NonFiniteError: the loss or gradient is NaN or infinite, once more than `guard` lets pass. On a GPU with
                fused optimizers this update and all later ones are left out on the device, and the error comes by the
                next logged step: nothing waits here.
            LossSpike: the loss has jumped, and the answer is to go back to the last checkpoint.
            PersistentSpikeError: the loss has jumped more often in a row than `guard` lets pass.
        """
        set_schedule(self._optimizers, lr, weight_decay)
        sums, count = self._compute_gradients(window.microbatches)
        if self._scaler is not None:
            for optimizer in self._optimizers:
                self._scaler.unscale_(optimizer)
        norms = self._norms if self._norms is not None and self._norms.is_due(step) else None
        before = None if norms is None else norms.before_update()
        grad_norm = clip_grad_norm_(self._parameters, self._max_norm)
        total = reduce_sums(sums, self._metrics, self._world)
        result = StepResult(total.loss / count, grad_norm, total.metrics)
        positions = [microbatch["position"] for microbatch in window.microbatches if "position" in microbatch]
        skipped = self._update(Attempt(step, result.loss, grad_norm, sums.loss, positions))
        by_block = None if norms is None or before is None else norms.after_update(before)
        return replace(result, skipped=skipped, norms=by_block)

    def discard_gradients(self, microbatches: Sequence[Microbatch]) -> None:
        """Compute and reduce the gradients of a window, and drop them: no update, and nothing else of a step.

        Args:
            microbatches: of this rank; as many on every rank.
        """
        self._compute_gradients(microbatches)
        for parameter in self._parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """What the guard and the loss scaler remember; plain JSON."""
        return {
            "guard": self.guard.state_dict(),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.guard.load_state_dict(state["guard"])
        if self._scaler is not None and state["scaler"] is not None:
            self._scaler.load_state_dict(state["scaler"])

    def _compute_gradients(self, microbatches: Sequence[Microbatch]) -> tuple[LossSum, Tensor | int]:
        """Leave a window's gradients in the parameters; return this rank's sums and the valid items of all ranks."""
        num_valid = [self._objective.num_valid(microbatch) for microbatch in microbatches]
        count = self._global_count(sum(num_valid))
        # DDP and FSDP2 average gradients over ranks; the loss is a sum over all of them.
        with self._precision.window(self._world.device):
            sums = self._forward_backward(microbatches, num_valid, self._world.dp_size / count)
        self._sync.finish()
        return sums, count

    def _update(self, attempt: Attempt) -> Tensor | bool:
        """Take the optimizers' step unless the guard objects; whether it was left out."""
        try:
            left_out = self.guard.should_skip(attempt)
            if isinstance(left_out, Tensor):
                found_inf = left_out.float()
                for optimizer in self._optimizers:
                    optimizer.grad_scale, optimizer.found_inf = None, found_inf  # type: ignore[attr-defined]
                    optimizer.step()
                return left_out if self.guard.skips_on_device else False
            return left_out or not self._step()
        finally:
            if self._scaler is not None:
                self._scaler.update()
            for optimizer in self._optimizers:
                optimizer.zero_grad()

    def _step(self) -> bool:
        """Update the weights; False where a gradient overflowed in fp16, which is no fault: the scale is lowered."""
        if self._scaler is not None:
            return all(self._scaler.step(optimizer) for optimizer in self._optimizers)
        for optimizer in self._optimizers:
            optimizer.step()
        return True

    def _global_count(self, count: int) -> Tensor | int:
        """Valid items of the whole global batch, at least one, given this rank's."""
        if self._world.dp_size == 1:
            return max(count, 1)
        # A fill, unlike a copy from the host, does not wait for the device.
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
                    part = self._objective.loss(self._model, on_device)
                total = part.loss * scale
                scaled = total if self._scaler is None else self._scaler.scale(total)
                torch.autograd.backward(scaled)
            loss = part.loss.detach() if loss is None else loss + part.loss.detach()
            add_metrics(metrics, part.metrics, num_valid[index])
        assert loss is not None, "a window holds at least one microbatch"
        return LossSum(loss, metrics)


def set_schedule(optimizers: Iterable[Optimizer], lr: float, weight_decay: float | None = None) -> None:
    """Give every group its learning rate, and its weight decay unless that is None, for the next update."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
            if weight_decay is not None:
                group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)


def to_device(microbatch: Microbatch, device: torch.device) -> Microbatch:
    """The microbatch on the device, but for what stays in host memory."""
    if device.type == "cpu":
        return microbatch
    return {k: v if k in HOST_ENTRIES else v.to(device, non_blocking=True) for k, v in microbatch.items()}
