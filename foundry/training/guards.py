"""Guards against non-finite losses and gradients and against loss spikes."""

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from foundry.config.schemas.guard import Guard, SpikeAction
from foundry.core.state_values import read_count, read_numbers
from foundry.parallel.precision import LossScaler
from foundry.parallel.process_group import World

log = logging.getLogger(__name__)


class NonFiniteError(RuntimeError):
    """The loss or the gradient is not finite; the weights were not updated."""


class PersistentSpikeError(RuntimeError):
    """The loss stays high after a spike; the weights were not updated."""


class LossSpike(RuntimeError):
    """The loss jumped; the weights were not updated. The trainer rolls back to the last checkpoint.

    Attributes:
        step: step of the loss; the samples of this step have been read.
        loss: mean loss over the global batch.
        zscore: distance of the loss from the previous losses, see `LossWindow`.
    """

    def __init__(self, step: int, loss: float, zscore: float) -> None:
        super().__init__(f"step {step}: the loss {loss:g} is a spike, with a robust z-score of {zscore:.1f}")
        self.step, self.loss, self.zscore = step, loss, zscore


@dataclass(frozen=True)
class Attempt:
    """An update about to be applied, after gradient reduction and before the optimizer step.

    Attributes:
        step: step number, counted from 1.
        loss: () float32, mean over the global batch, equal on all ranks.
        grad_norm: () float32, before clipping, over the global batch, equal on all ranks.
        local_loss: () float32, sum over this rank's part of the batch.
        positions: (batch,) int64 tensors in host memory: positions of this rank's samples in the global order; -1 is
            padding.
    """

    step: int
    loss: Tensor
    grad_norm: Tensor
    local_loss: Tensor
    positions: Sequence[Tensor]


class LossWindow:
    """Window of the last accepted losses, used to compute the z-score of a new loss.

    Args:
        size: window size; the z-score is 0 until the window is a quarter full.
    """

    def __init__(self, size: int) -> None:
        self.losses: deque[float] = deque(maxlen=size)
        self._least = size / 4

    def zscore(self, loss: float) -> float:
        """Return the modified z-score 0.6745 (loss - median) / MAD, of Iglewicz and Hoaglin, 1993, section 3.3.

        MAD is the median absolute deviation from the median. If MAD is 0, because most losses are the same number,
        there is no scale for the increase and the score is 0.
        """
        if len(self.losses) < self._least:
            return 0.0
        middle = median(self.losses)
        deviation = median(abs(previous - middle) for previous in self.losses)
        return 0.6745 * (loss - middle) / deviation if deviation > 0 else 0.0


class UpdateGuard:
    """Decides before each update whether to skip it; the decision is the same on all ranks.

    If the guard decides on the device (see `on_device`), the finite check runs there without a synchronization, and the
    host learns the result in `check`. Otherwise the host reads loss and gradient norm in every step.
    """

    def __init__(
        self,
        config: Guard,
        optimizers: Sequence[Optimizer],
        world: World,
        *,
        scaler: LossScaler | None = None,
        on_device: bool | None = None,
    ) -> None:
        """Create a guard for the updates of all optimizers.

        Args:
            config: guard settings.
            optimizers: all optimizers of the run.
            world: process group of the run.
            scaler: loss scaler, or None; it handles gradients that overflow until its scale is below 1.
            on_device: decide on the device; None does so on a GPU if all optimizers support it, and without a loss
                scaler and spike detection.
        """
        self._config, self._world, self._scaler = config, world, scaler
        self._window = None if config.spike_zscore is None else LossWindow(config.spike_window)
        if on_device is None:
            reads_loss = scaler is not None or self._window is not None
            on_device = world.device.type == "cuda" and not reads_loss and all(map(_skips_on_device, optimizers))
        self._on_device = on_device
        self._in_a_row = 0
        self._pending: list[tuple[Attempt, Tensor]] = []
        self._non_finite_in_a_row = torch.zeros((), dtype=torch.int32, device=world.device)
        self._failed = torch.zeros((), dtype=torch.bool, device=world.device)
        self._seen = torch.zeros((), dtype=torch.bool, pin_memory=world.device.type == "cuda")
        if on_device:
            _start_momentum(optimizers)

    @property
    def skips_on_device(self) -> bool:
        """True if the guard decides on the device, and the run may continue after a skipped update."""
        return self._on_device and self._config.max_non_finite > 0

    def should_skip(self, attempt: Attempt) -> Tensor | bool:
        """Return whether to skip the update: a bool, or a () bool tensor if the device decides.

        Raises:
            NonFiniteError: loss or gradient is not finite, and the number of consecutive skips exceeds the limit in the
                configuration. If the device decides, it skips this and all later updates, and `check` raises the error.
            LossSpike: the loss jumped, and the configuration asks for a rollback.
            PersistentSpikeError: the loss jumped in more consecutive steps than the configuration allows.
        """
        if self._on_device:
            return self._judge_on_device(attempt)
        loss = attempt.loss.item()
        if self._is_fault(loss, attempt.grad_norm.item()):
            self._skip_non_finite(attempt)
            return True
        limit = self._config.spike_zscore
        if self._window is not None and limit is not None:
            zscore = self._window.zscore(loss)
            if zscore > limit:
                self._skip_spike(attempt, LossSpike(attempt.step, loss, zscore))
                return True
            self._window.losses.append(loss)
        self._in_a_row = 0
        return False

    def check(self) -> None:
        """Read from the device which updates it skipped since the last call, and log each skipped update.

        All ranks must call this at the same step, and before they save a checkpoint.

        Raises:
            NonFiniteError: loss or gradient were non-finite in more consecutive updates than the configuration allows.
        """
        if not self._pending:
            return
        flags = torch.stack([is_non_finite for _, is_non_finite in self._pending]).tolist()
        attempts, self._pending = [attempt for attempt, _ in self._pending], []
        for attempt, is_non_finite in zip(attempts, flags, strict=True):
            if is_non_finite:
                self._skip_non_finite(attempt)
            else:
                self._in_a_row = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the window of losses and the number of consecutive skipped updates as plain JSON."""
        assert not self._pending, "call check() before saving a checkpoint"
        return {"losses": [] if self._window is None else list(self._window.losses), "in_a_row": self._in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`; a window of another size keeps the latest losses."""
        self._pending.clear()
        self._in_a_row = read_count(state, "in_a_row")
        self._non_finite_in_a_row.fill_(self._in_a_row)
        self._failed.fill_(False)
        if self._window is not None:
            self._window.losses.clear()
            self._window.losses.extend(read_numbers(state, "losses"))

    def _is_fault(self, loss: float, grad_norm: float) -> bool:
        if math.isfinite(loss) and not math.isfinite(grad_norm) and self._scaler is not None:
            # A scale below 1 shrinks the gradients, so the scale did not cause the overflow.
            return self._scaler.get_scale() < 1
        return not math.isfinite(loss + grad_norm)

    def _judge_on_device(self, attempt: Attempt) -> Tensor:
        # `_seen` is in host memory: it holds the flag of an earlier step, so reading it does not synchronize. Several
        # ranks could see the flag at different steps: they wait for the trainer's `check`, and the device applies no
        # update until then.
        if self._world.world_size == 1 and self._seen.item():
            self.check()
        is_non_finite = ~torch.isfinite(attempt.loss + attempt.grad_norm)
        self._non_finite_in_a_row = torch.where(is_non_finite, self._non_finite_in_a_row + 1, 0)
        self._failed = self._failed | (self._non_finite_in_a_row > self._config.max_non_finite)
        self._pending.append((attempt, is_non_finite))
        self._seen.copy_(self._failed, non_blocking=True)
        return is_non_finite | self._failed

    def _skip_non_finite(self, attempt: Attempt) -> None:
        ranks, samples = self._locate(attempt)
        cause = f"the loss on rank {', '.join(map(str, ranks))}" if ranks else "the gradient norm"
        text = f"step {attempt.step}: {cause} is not finite"
        allowed = self._config.max_non_finite
        self._in_a_row += 1
        if self._in_a_row > allowed:
            raise NonFiniteError(self._final_message(text, samples))
        self._warn(text, samples)

    def _skip_spike(self, attempt: Attempt, spike: LossSpike) -> None:
        if self._config.spike_action is SpikeAction.rollback:
            raise spike
        _, samples = self._locate(attempt)
        self._in_a_row += 1
        if self._in_a_row > self._config.max_skips:
            raise PersistentSpikeError(self._final_message(str(spike), samples))
        self._warn(str(spike), samples)

    def _final_message(self, text: str, samples: str) -> str:
        num_skipped, max_skips = self._in_a_row - 1, self._config.max_skips
        row = (
            f", after {num_skipped} updates in a row that were skipped (guard.max_skips={max_skips})"
            if num_skipped
            else ""
        )
        return f"{text}{row}; this step did not change the weights{samples}"

    def _warn(self, text: str, samples: str) -> None:
        if self._world.is_main:
            row = f"{self._in_a_row} in a row of at most {self._config.max_skips}"
            log.warning("%s; its update is skipped, %s%s", text, row, samples)

    def _locate(self, attempt: Attempt) -> tuple[list[int], str]:
        """Return the ranks whose local loss is not finite, and the sample range of the global batch as text."""
        world = self._world
        valid_positions = [p for positions in attempt.positions for p in positions.tolist() if p >= 0]
        # float64 represents every position exactly.
        rows = torch.zeros(world.world_size, 3, dtype=torch.float64, device=world.device)
        values = [
            float(not math.isfinite(attempt.local_loss.item())),
            min(valid_positions, default=-1),
            max(valid_positions, default=-1),
        ]
        rows[world.rank] = torch.tensor(values, dtype=torch.float64)
        all_values = world.all_reduce_sum(rows).tolist()
        ranks = [rank for rank, (is_non_finite, _, _) in enumerate(all_values) if is_non_finite]
        if (last := max(high for _, _, high in all_values)) < 0:
            return ranks, ""
        first = min(low for _, low, _ in all_values if low >= 0)
        return ranks, f" (samples {first:.0f} to {last:.0f} of the global order)"


def _skips_on_device(optimizer: Optimizer) -> bool:
    """Return True if the optimizer can skip a step on the GPU if `found_inf` is 1, as fused optimizers can.

    With offloaded weights it cannot, because the step runs on the CPU.
    """
    on_gpu = all(p.device.type == "cuda" for group in optimizer.param_groups for p in group["params"])
    return on_gpu and getattr(optimizer, "_step_supports_amp_scaling", False)


def _start_momentum(optimizers: Sequence[Optimizer]) -> None:
    """Initialize SGD's momentum buffers with 0; the first update is the same as without buffers.

    Otherwise the fused kernel allocates the buffers in the first step, and leaves them uninitialized if it skips that
    step.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, SGD):
            for group in optimizer.param_groups:
                for parameter in group["params"] if group["momentum"] != 0 else ():
                    optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
