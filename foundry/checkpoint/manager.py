"""When a run saves, what, and how it goes back."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from foundry.checkpoint.folder import CheckpointError, read_manifest
from foundry.checkpoint.rng import rng_state
from foundry.checkpoint.saver import Checkpointer
from foundry.checkpoint.tensors import collect, describe, restore_into
from foundry.checkpoint.verification import verify_newest
from foundry.core.duration import Interval
from foundry.core.ema import WeightAverage
from foundry.core.errors import ConfigError, Violation
from foundry.core.progress import Progress
from foundry.parallel.process_group import World
from foundry.run_dir.checkpoints import step_name
from foundry.run_dir.names import CHECKPOINTS


@dataclass(kw_only=True)
class ShardedCheckpointManager:
    """A run's checkpoints, as the trainer asks for them.

    Attributes:
        checkpointer: writes them.
        model: as it was wrapped.
        ema: averaged weights, where kept.
        optimizers: all of the run.
        world: this rank and the others.
        interval: between checkpoints; None: by time only.
        every_minutes: between checkpoints; None: by interval only.
        facts: what every manifest says of the run: config_hash, config and strategy.
        trained_only: of the weights, save those that are trained; the rest lies elsewhere.
    """

    checkpointer: Checkpointer
    model: nn.Module
    ema: WeightAverage | None
    optimizers: Sequence[Optimizer]
    world: World
    interval: Interval | None
    every_minutes: float | None
    facts: dict[str, Any]
    trained_only: bool = False
    _since: float = field(default_factory=time.monotonic)
    _is_checked: bool = False

    def is_time(self) -> bool:
        """Whether the minutes are over; true once each time, and on rank 0 only, whose clock counts."""
        if self.every_minutes is None or not self.world.is_main:
            return False
        now = time.monotonic()
        if now - self._since < 60 * self.every_minutes:
            return False
        self._since = now
        return True

    def is_due(self, step: int, samples_before: int, samples_after: int, tokens: tuple[int, int] | None = None) -> bool:
        """Whether the interval asks for one after step `step`, which consumed those samples and tokens."""
        return self.interval is not None and self.interval.due(step, samples_before, samples_after, tokens)

    def check_state(self) -> None:
        """Find out whether the optimizers' state can be saved as soon as there is some, and not at the first save.

        Raises:
            ConfigError: it cannot.
        """
        if self._is_checked or not any(optimizer.state for optimizer in self.optimizers):
            return
        self._is_checked = True
        try:
            collect(self.model, None, self.optimizers)
        except CheckpointError as error:
            raise ConfigError(Violation("optimizer", str(error))) from error

    def save(
        self,
        progress: Progress,
        state: dict[str, Any],
        tensors: Mapping[str, Tensor],
        *,
        metric: float | None,
        is_best: bool,
        wait: bool,
    ) -> Path:
        """Save the run as it is; with `wait`, return only when it is on the disk.

        Raises:
            SaveError: it was waited for and could not be written; with `checkpoint.strict_saves`, the one before.
        """
        self._since = time.monotonic()
        manifest = {
            **self.facts,
            "samples": progress.samples,
            "tokens": progress.tokens,
            "state": state,
            "optimizer": describe(self.model, self.optimizers),
        }
        self.checkpointer.save(
            progress.steps,
            tensors=partial(collect, self.model, self.ema, self.optimizers, tensors, trained_only=self.trained_only),
            manifest=manifest,
            rank_state=rng_state(self.world.device),
            metric=metric if metric is not None and math.isfinite(metric) else None,
            is_best=is_best,
            wait=wait,
        )
        return self.checkpointer.run_dir / CHECKPOINTS / step_name(progress.steps)

    def finish(self) -> None:
        """Wait until everything is on the disk.

        Raises:
            SaveError: the last one could not be written.
        """
        self.checkpointer.finish()

    def close(self) -> None:
        """Wait for a save that is still being written, unless it may need ranks that are gone."""
        if self.world.world_size == 1:
            self.checkpointer.join()

    def roll_back(self) -> dict[str, Any] | None:
        """Bring back the weights and optimizers of the newest checkpoint; its trainer's state, None if there is none.

        Random numbers continue: what they were drawn for is not read again.
        """
        self.checkpointer.join()
        folder = verify_newest(self.checkpointer.run_dir, self.world)
        if folder is None:
            return None
        restore_into(folder, self.model, self.ema, self.optimizers, trained_only=self.trained_only, world=self.world)
        return dict(read_manifest(folder).state)


class NoCheckpoints:
    """Keeps nothing."""

    def is_time(self) -> bool:
        """Never."""
        return False

    def is_due(self, step: int, samples_before: int, samples_after: int, tokens: tuple[int, int] | None = None) -> bool:
        """Never."""
        return False

    def check_state(self) -> None:
        """Nothing is to be saved."""

    def save(
        self,
        progress: Progress,
        state: dict[str, Any],
        tensors: Mapping[str, Tensor],
        *,
        metric: float | None,
        is_best: bool,
        wait: bool,
    ) -> None:
        """Save nothing."""

    def finish(self) -> None:
        """Wait for nothing."""

    def close(self) -> None:
        """Nothing is being written."""

    def roll_back(self) -> None:
        """There is nothing to go back to."""
