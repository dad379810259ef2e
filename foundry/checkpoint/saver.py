"""Saving of checkpoints, synchronously or in the background; a failed save does not stop the run."""

import logging
import math
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from foundry import __version__
from foundry.checkpoint.exchange import find_newest
from foundry.checkpoint.folder import CheckpointError, Manifest, partial_path, read_manifest
from foundry.checkpoint.mirror.thread import Mirror
from foundry.checkpoint.rng import rng_state
from foundry.checkpoint.shard import HostCopies, own_chunks
from foundry.checkpoint.tensors import collect, describe, restore_into
from foundry.checkpoint.writer import CheckpointWriter, NewCheckpoint
from foundry.core.duration import Interval
from foundry.core.ema import WeightAverage
from foundry.core.errors import ConfigError, Violation
from foundry.core.progress import Progress
from foundry.core.protocols import SaveError
from foundry.parallel.process_group import World, side_group
from foundry.run_dir.checkpoints import step_name
from foundry.run_dir.names import CHECKPOINTS

log = logging.getLogger(__name__)


class Checkpointer:
    """Writer of a run's checkpoints, which also deletes old checkpoints according to the retention settings.

    All ranks construct a `Checkpointer` and call `write` and `finish` together. If a save fails, rank 0 logs one line,
    training continues and earlier checkpoints stay. A save must succeed only if training waits for it, as for the last
    one of a run, or with `strict`.

    Attributes:
        run_dir: the run directory.
        failed_saves: number of checkpoints that could not be written.
        blocked_seconds: time that the training thread spent in the last `write`.
        seconds: duration of the last save that succeeded or failed, from the call of `write` to the end of the save.
    """

    def __init__(
        self,
        run_dir: Path,
        world: World,
        *,
        model: nn.Module,
        ema: WeightAverage | None = None,
        optimizers: Sequence[Optimizer] = (),
        trained_only: bool = False,
        facts: Mapping[str, Any] = MappingProxyType({}),
        interval: Interval | None = None,
        every_minutes: float | None = None,
        asynchronous: bool,
        keep_last: int | None,
        keep_every_steps: int | None,
        strict: bool,
        check_run_dir: Callable[[], None] = lambda: None,
        alive: Callable[[], None] | None = None,
        mirror: Mirror | None = None,
    ) -> None:
        """Prepare to save into a run directory; each save first deletes the remains of interrupted saves.

        Args:
            run_dir: the run directory, shared by all ranks, or with the same path on the disks in `world.disks`.
            world: this rank and its process group.
            model: the wrapped model.
            ema: averaged weights; None if the run does not average weights.
            optimizers: all optimizers of the run.
            trained_only: skip frozen weights and buffers, which are stored elsewhere.
            facts: constant entries of every manifest: config_hash, config, strategy, data and base.
            interval: interval between checkpoints; None for `every_minutes` only.
            every_minutes: minutes between checkpoints; None for `interval` only.
            asynchronous: block training only while tensors are copied to host memory.
            keep_last: number of newest checkpoints to keep; None keeps all.
            keep_every_steps: checkpoints at multiples of this number of steps are kept permanently; None disables this
                rule.
            strict: raise the error of a failed save at the next call of `write` or `finish`.
            check_run_dir: called on rank 0, and on the leaders of other disks, before a save writes anything; raises if
                the run directory is lost.
            alive: heartbeat for the watchdog, called as the save makes progress while training waits for it.
            mirror: thread that copies each checkpoint into a store; None for a run without a mirror.
        """
        self.run_dir, self._alive = run_dir, alive
        self._model, self._ema, self._optimizers = model, ema, optimizers
        self._trained_only, self._facts = trained_only, facts
        self._interval, self._every_minutes = interval, every_minutes
        self._since = time.monotonic()
        self._is_state_checked = self._is_waited_for = False
        self._world, self._strict = world, strict
        # A separate group keeps the background thread's collectives apart from the training thread's.
        group = side_group(world) if asynchronous else None
        self._writer = CheckpointWriter(
            run_dir,
            world,
            group,
            keep_last=keep_last,
            keep_every_steps=keep_every_steps,
            check_run_dir=check_run_dir,
            alive=self._report_alive,
            mirror=mirror,
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if asynchronous else None
        self._copies = HostCopies()
        self._pending: Future[None] | None = None
        self._error: SaveError | None = None
        self.failed_saves, self.blocked_seconds, self.seconds = 0, 0.0, 0.0

    @property
    def pending(self) -> bool:
        """Whether a save is still being written."""
        return self._pending is not None and not self._pending.done()

    def is_time(self) -> bool:
        """Return whether `every_minutes` have passed since the last save.

        A True result restarts the interval. Only rank 0 returns True, since its clock decides.
        """
        if self._every_minutes is None or not self._world.is_main:
            return False
        now = time.monotonic()
        if now - self._since < 60 * self._every_minutes:
            return False
        self._since = now
        return True

    def is_due(self, step: int, samples_before: int, samples_after: int, tokens: tuple[int, int] | None = None) -> bool:
        """Return whether a checkpoint is due after a step, given the samples and tokens before and after the step."""
        return self._interval is not None and self._interval.due(step, samples_before, samples_after, tokens)

    def check_state(self) -> None:
        """Check that the state of the optimizers can be saved; once, as soon as any optimizer has state.

        Raises:
            ConfigError: if the state of an optimizer cannot be saved.
        """
        if self._is_state_checked or not any(optimizer.state for optimizer in self._optimizers):
            return
        self._is_state_checked = True
        try:
            collect(self._model, None, self._optimizers)
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
        """Save the current state of the run; with `wait`, return only when the checkpoint is on disk.

        Raises:
            SaveError: if this save failed and `wait` is set, or an earlier one failed with `checkpoint.strict_saves`.
        """
        self._since = time.monotonic()
        manifest = {
            **self._facts,
            "samples": progress.samples,
            "tokens": progress.tokens,
            "state": state,
            "optimizer": describe(self._model, self._optimizers),
        }
        self.write(
            progress.steps,
            tensors=partial(
                collect, self._model, self._ema, self._optimizers, tensors, trained_only=self._trained_only
            ),
            manifest=manifest,
            rank_state=rng_state(self._world.device),
            metric=metric if metric is not None and math.isfinite(metric) else None,
            is_best=is_best,
            wait=wait,
        )
        return self.run_dir / CHECKPOINTS / step_name(progress.steps)

    def close(self) -> None:
        """End the background thread; several ranks do not wait for its pending save, since some may be gone."""
        if self._world.world_size == 1:
            self.join()
        if self._thread is not None:
            self._thread.shutdown(wait=self._world.world_size == 1)

    def roll_back(self) -> dict[str, Any] | None:
        """Restore weights and optimizers from the newest intact checkpoint.

        The RNG states are not restored, because the run does not read the same data again.

        Returns:
            State of the trainer from that checkpoint; None if there is no intact checkpoint.
        """
        self.join()
        folder = find_newest(self.run_dir, self._world, self._alive)
        if folder is None:
            return None
        restore_into(
            folder, self._model, self._ema, self._optimizers, trained_only=self._trained_only, world=self._world
        )
        return dict(read_manifest(folder).state)

    def write(
        self,
        step: int,
        *,
        tensors: Callable[[], dict[str, Tensor]],
        manifest: Mapping[str, Any],
        rank_state: Mapping[str, Any],
        metric: float | None = None,
        is_best: bool = False,
        wait: bool = False,
    ) -> None:
        """Write a checkpoint; if an intact one of this step exists, only update symlinks and delete old checkpoints.

        Waits for a pending save first.

        Args:
            step: optimizer steps taken.
            tensors: returns the tensors to save, as `collect` does; called immediately.
            manifest: further fields of `Manifest` about the run and its state, such as `config`.
            rank_state: state of this rank, as plain JSON.
            metric: finite value of the run's main metric; None if it was not measured at this step, or is not finite.
            is_best: whether to point the symlink `best` to this checkpoint.
            wait: return only when the checkpoint is on disk.

        Raises:
            SaveError: if an earlier save failed and `strict` is set, or this save failed and `wait` is set.
        """
        begin = time.perf_counter()
        if self.pending:
            self.join()
            log.info("step %d waited %.1f s for the previous checkpoint", step, time.perf_counter() - begin)
        error, self._error = self._error, None
        if error is not None and self._strict:
            raise error
        chunks = own_chunks(tensors(), rank=self._world.rank, world_size=self._world.world_size)
        in_background = self._thread is not None and not wait
        full_manifest = Manifest(
            step=step,
            metric=metric,
            world_size=self._world.world_size,
            versions={"foundry": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
            **manifest,
        )
        if self._thread is not None:  # also with `wait`: waiting for each tensor's copy from a GPU would be slower
            chunks = self._copies.take(chunks, from_host=in_background)
        checkpoint = NewCheckpoint(full_manifest, chunks, rank_state, is_best)
        if self._thread is not None and in_background:
            self._pending = self._thread.submit(self._run, checkpoint, begin)
        else:
            self._is_waited_for = True
            self._run(checkpoint, begin)
            self._is_waited_for = False
        self.blocked_seconds = time.perf_counter() - begin
        if wait:
            self._raise_error()

    def finish(self) -> None:
        """Wait until all saves are on disk.

        Raises:
            SaveError: if the last save failed.
        """
        self.join()
        self._raise_error()

    def join(self) -> None:
        """Wait for a pending save; if it failed, do not raise its error."""
        if self._pending is not None:
            self._is_waited_for = True
            self._pending.result()
            self._pending, self._is_waited_for = None, False

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, checkpoint: NewCheckpoint, begin: float) -> None:
        """Write a checkpoint; if that raises an exception, log it, count it and keep it as a `SaveError`."""
        step = checkpoint.manifest.step
        try:
            self._writer.write(checkpoint)
        except Exception as error:
            self.failed_saves += 1
            folder = self.run_dir / CHECKPOINTS / step_name(step)
            self._error = SaveError(f"no checkpoint of step {step} at {folder}: {error}")
            if self._world.leads_disk:
                shutil.rmtree(partial_path(self.run_dir, step), ignore_errors=True)
            if self._world.is_main:
                log.error("%s; earlier checkpoints are kept", self._error)
        self.seconds = time.perf_counter() - begin

    def _report_alive(self) -> None:
        """Send a heartbeat if training waits for this save; otherwise training sends its own heartbeats."""
        if self._alive is not None and self._is_waited_for:
            self._alive()


class NoCheckpoints:
    """Checkpointer for a run that saves no checkpoints."""

    def is_time(self) -> bool:
        """Return False."""
        return False

    def is_due(self, *args: Any) -> bool:
        """Return False."""
        return False

    def check_state(self) -> None:
        """Do nothing."""

    def save(self, *args: Any, **options: Any) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def roll_back(self) -> None:
        """Return None."""
