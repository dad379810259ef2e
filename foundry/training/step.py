"""One optimizer step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from foundry.optim.optimizers import set_schedule
from foundry.parallel.grad_norm import clip_, global_grad_norm
from foundry.parallel.precision import PrecisionPolicy
from foundry.parallel.process_group import World
from foundry.training.protocols import LossSum, Microbatch, Objective, Synchroniser, Window


class NonFiniteError(RuntimeError):
    """The loss or the gradient is not finite; nothing was updated."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step saw; everything is over the whole global batch and stays on the device.

    Attributes:
        loss: () float32, the mean over valid items.
        grad_norm: () float32, before clipping.
        metrics: () float32 each, means over valid items.
    """

    loss: Tensor
    grad_norm: Tensor
    metrics: dict[str, Tensor]


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
    ) -> None:
        self._model, self._objective, self._optimizers = model, objective, optimizers
        self._sync, self._precision, self._world = sync, precision, world
        self._max_norm = math.inf if max_grad_norm is None else max_grad_norm
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._scaler = precision.scaler(world.device)
        self.guard = FiniteGuard(optimizers, world)

    def __call__(self, window: Window, lr: float, step: int, *, weight_decay: float | None = None) -> StepResult:
        """Update the model once.

        Args:
            window: this rank's microbatches of the global batch.
            lr: the learning rate of this update.
            step: the number of this step, for messages.
            weight_decay: of this update; None: the optimizers' own.

        Raises:
            NonFiniteError: the loss or gradient is NaN or infinite. On a GPU with a fused optimizer this update and all
                later ones are left out on the device, and the error comes by the next logged step: nothing waits here.
        """
        count = self._count_valid(window.microbatches)
        set_schedule(self._optimizers, lr, weight_decay)
        sums = self._accumulate(window.microbatches, count)
        self._sync.finish()
        if self._scaler is not None:
            for optimizer in self._optimizers:
                self._scaler.unscale_(optimizer)
        grad_norm = global_grad_norm(self._parameters)
        if self._max_norm < math.inf:
            clip_(self._parameters, grad_norm, self._max_norm)
        result = self._reduce(sums, count, grad_norm)
        self._update(result, sums.loss, step)
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        return result

    def _update(self, result: StepResult, local_loss: Tensor, step: int) -> None:
        if self._scaler is None:
            self.guard.step(result, local_loss, step)
            return
        # A gradient that overflows in fp16 is no fault: the scaler leaves the update out and lowers its scale. The loss
        # is not scaled; once it is not finite, no scale will mend it. The scaler reads the device anyhow.
        self.guard.check_loss(result, local_loss, step)
        for optimizer in self._optimizers:
            self._scaler.step(optimizer)
        self._scaler.update()

    def _count_valid(self, microbatches: Sequence[Microbatch]) -> Tensor | int:
        """Valid items of the whole global batch, at least one."""
        count = sum(self._objective.count(microbatch) for microbatch in microbatches)
        if self._world.world_size == 1:
            return max(count, 1)
        # A fill, unlike a copy from the host, does not wait for the device.
        total = torch.full((), float(count), dtype=torch.float64, device=self._world.device)
        return self._world.all_reduce_sum(total).clamp_(min=1).float()

    def _accumulate(self, microbatches: Sequence[Microbatch], count: Tensor | int) -> LossSum:
        """Run forward and backward over the window; return this rank's sums."""
        # DDP and FSDP2 average gradients over ranks; the loss is a sum over all of them.
        scale = self._world.world_size / count
        loss: Tensor | None = None
        metrics: dict[str, Tensor] = {}
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
            for name, value in part.metrics.items():
                metrics[name] = metrics[name] + value.detach() if name in metrics else value.detach()
        assert loss is not None, "a window holds at least one microbatch"
        return LossSum(loss, metrics)

    def _reduce(self, sums: LossSum, count: Tensor | int, grad_norm: Tensor) -> StepResult:
        """Add up the sums over ranks and divide by the valid items."""
        if self._world.world_size == 1:
            return StepResult(sums.loss / count, grad_norm, {k: v / count for k, v in sums.metrics.items()})
        total = self._world.all_reduce_sum(torch.stack([sums.loss, *sums.metrics.values()])) / count
        return StepResult(total[0], grad_norm, dict(zip(sums.metrics, total[1:], strict=True)))


class FiniteGuard:
    """Takes the optimizers' step only if loss and gradient are finite; once they were not, never again."""

    def __init__(self, optimizers: Sequence[Optimizer], world: World, *, on_device: bool | None = None) -> None:
        """Guard the optimizers.

        Args:
            optimizers: all of the run.
            world: this rank and the others.
            on_device: decide on the device, without waiting for it; None: on a GPU, if every optimizer can.
        """
        self._optimizers, self._world = optimizers, world
        on_gpu = world.device.type == "cuda"
        if on_device is None:
            # Fused optimizers skip their update on the device when `found_inf` is 1, as for gradient scaling.
            on_device = on_gpu and all(getattr(o, "_step_supports_amp_scaling", False) for o in optimizers)
        self._on_device = on_device
        self._bad_step = torch.zeros((), device=world.device)
        self._bad_loss = torch.zeros((), device=world.device)
        self._seen = torch.zeros((), pin_memory=on_gpu)

    def step(self, result: StepResult, local_loss: Tensor, step: int) -> None:
        """Update the weights if this step's loss and gradient norm, which all ranks share, are finite.

        Raises:
            NonFiniteError: they are not; names the step and the ranks.
        """
        if not self._on_device:
            if not math.isfinite(result.loss.item() + result.grad_norm.item()):
                self._raise(step, local_loss)
            for optimizer in self._optimizers:
                optimizer.step()
            return
        # Host memory: it tells of an earlier step, and waits for nothing. Several ranks might see it at different
        # steps; they wait for `check`, and until then nothing is updated.
        if self._world.world_size == 1 and self._seen.item() > 0:
            self._raise(int(self._seen.item()), self._bad_loss)
        first_bad = ~torch.isfinite(result.loss + result.grad_norm) & (self._bad_step == 0)
        self._bad_step += first_bad * step
        self._bad_loss = torch.where(first_bad, local_loss, self._bad_loss)
        found_inf = (self._bad_step > 0).float()
        for optimizer in self._optimizers:
            optimizer.grad_scale, optimizer.found_inf = None, found_inf  # type: ignore[attr-defined]
            optimizer.step()
        self._seen.copy_(self._bad_step, non_blocking=True)

    def check_loss(self, result: StepResult, local_loss: Tensor, step: int) -> None:
        """Wait for the device and raise if this step's loss is not finite.

        Raises:
            NonFiniteError: it is not.
        """
        if not math.isfinite(result.loss.item()):
            self._raise(step, local_loss)

    def check(self) -> None:
        """Wait for the device and raise if any step so far was not finite; all ranks call it at the same step.

        Raises:
            NonFiniteError: one was not.
        """
        if self._on_device and self._bad_step.item() > 0:
            self._raise(int(self._bad_step.item()), self._bad_loss)

    def _raise(self, step: int, local_loss: Tensor) -> None:
        bad = torch.zeros(self._world.world_size, device=self._world.device)
        bad[self._world.rank] = (~torch.isfinite(local_loss)).float()
        ranks = self._world.all_reduce_sum(bad).nonzero().flatten().tolist()
        cause = f"the loss on rank {', '.join(map(str, ranks))}" if ranks else "the gradient norm"
        raise NonFiniteError(f"step {step}: {cause} is not finite; the weights are as they were before this step")


def to_device(microbatch: Microbatch, device: torch.device) -> Microbatch:
    """The microbatch on the device; `position` stays in host memory."""
    if device.type == "cpu":
        return microbatch
    return {k: v if k == "position" else v.to(device, non_blocking=True) for k, v in microbatch.items()}
