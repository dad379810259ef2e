"""Saving checkpoints, at once or in the background, so that a failure costs a checkpoint and not the run."""

import logging
import math
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from foundry import __version__
from foundry.checkpoint.folder import (
    CheckpointError,
    FileFacts,
    Manifest,
    link,
    partial_path,
    publish,
    read_manifest,
    write_durably,
    write_json,
)
from foundry.checkpoint.retention import remove, remove_leftovers, to_remove
from foundry.checkpoint.rng import rng_state
from foundry.checkpoint.shard import Chunk, HostCopies, own_chunks, write_shard
from foundry.checkpoint.tensor_index import INDEX, build_index
from foundry.checkpoint.tensors import collect, describe, restore_into
from foundry.checkpoint.verification import damage_together, together, verify_newest
from foundry.core.duration import Interval
from foundry.core.ema import WeightAverage
from foundry.core.errors import ConfigError, Violation
from foundry.core.progress import Progress
from foundry.core.protocols import SaveError
from foundry.parallel.process_group import World, side_group
from foundry.run_dir.checkpoints import BEST, LATEST, linked_step, list_checkpoints, parse_step, step_name
from foundry.run_dir.files import make_folder
from foundry.run_dir.names import CHECKPOINTS

log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True)
class _Save:
    """One checkpoint as this rank has to write it."""

    manifest: Manifest
    chunks: Mapping[str, Chunk]
    rank_state: Mapping[str, Any]
    is_best: bool
    begin: float


class Checkpointer:
    """Writes a run's checkpoints and keeps those that are wanted.

    All ranks construct it and call `write` and `finish` together. What goes wrong while writing is one line in the log
    of rank 0: training continues, and the checkpoints there were stay. Only a save that is waited for has to succeed,
    as the last one of a run.

    Attributes:
        run_dir: the run directory.
        failed_saves: how many could not be written.
        blocked_seconds: how long the last `write` kept the training thread.
        seconds: from the call of the last save that has ended to its end.
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
    ) -> None:
        """Prepare to save into a run directory; what interrupted saves have left there goes with the first save.

        Args:
            run_dir: the run directory, where all ranks see it.
            world: this rank and the others.
            model: the model as it was wrapped.
            ema: averaged weights, where kept.
            optimizers: all of the run.
            trained_only: of the weights, save those that are trained; the rest lies elsewhere.
            facts: entries of every manifest that do not change: config_hash, config, strategy, data and base.
            interval: between checkpoints; None: by time only.
            every_minutes: between checkpoints; None: by interval only.
            asynchronous: hold up training only while tensors are copied to host memory.
            keep_last: how many of the newest to keep; None: all.
            keep_every_steps: multiples of this are kept for good; None: there are none.
            strict: raise what went wrong, at the next call of `write` or `finish`.
            check_run_dir: called on rank 0 before a save writes anything; raises if the run directory is lost.
            alive: tells a watchdog, while training waits for a save, that more of it is on the disk.
        """
        self.run_dir, self._check_run_dir, self._alive = run_dir, check_run_dir, alive
        self._model, self._ema, self._optimizers = model, ema, optimizers
        self._trained_only, self._facts = trained_only, facts
        self._interval, self._every_minutes = interval, every_minutes
        self._since = time.monotonic()
        self._is_state_checked = self._is_waited_for = False
        self._world, self._strict = world, strict
        self._keep_last, self._keep_every_steps = keep_last, keep_every_steps
        # A group beside: the background thread's messages never meet those of the training thread.
        self._group = side_group(world) if asynchronous else None
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
        """Whether the minutes are over; true once each time, and on rank 0 only, whose clock counts."""
        if self._every_minutes is None or not self._world.is_main:
            return False
        now = time.monotonic()
        if now - self._since < 60 * self._every_minutes:
            return False
        self._since = now
        return True

    def is_due(self, step: int, samples_before: int, samples_after: int, tokens: tuple[int, int] | None = None) -> bool:
        """Whether the interval asks for one after step `step`, which consumed those samples and tokens."""
        return self._interval is not None and self._interval.due(step, samples_before, samples_after, tokens)

    def check_state(self) -> None:
        """Find out whether the optimizers' state can be saved as soon as there is some, and not at the first save.

        Raises:
            ConfigError: it cannot.
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
        """Save the run as it is; with `wait`, return only when it is on the disk.

        Raises:
            SaveError: it was waited for and could not be written; with `checkpoint.strict_saves`, the one before.
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
        """Wait for a save that is still being written, unless it may need ranks that are gone."""
        if self._world.world_size == 1:
            self.join()

    def roll_back(self) -> dict[str, Any] | None:
        """Bring back the weights and optimizers of the newest checkpoint; its trainer's state, None if there is none.

        Random numbers continue: what they were drawn for is not read again.
        """
        self.join()
        folder = verify_newest(self.run_dir, self._world)
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
        """Write a checkpoint of this step; if there is a whole one, only the links are set.

        One that is still being written is waited for first.

        Args:
            step: optimizer steps taken.
            tensors: gives what to save, as `collect` does; called at once.
            manifest: what the run knows: `samples`, `tokens`, `config_hash`, `config`, `strategy` and `state`.
            rank_state: plain JSON that only this rank knows.
            metric: by which the run is judged, finite, where it was measured at this step.
            is_best: no earlier step had a better one.
            wait: return only when it is on the disk.

        Raises:
            SaveError: with `strict`, an earlier save failed; or this one, if it was waited for.
        """
        begin = time.perf_counter()
        if self.pending:
            self.join()
            log.info("step %d waited %.1f s for the checkpoint before it", step, time.perf_counter() - begin)
        error, self._error = self._error, None
        if error is not None and self._strict:
            raise error
        chunks = own_chunks(tensors(), rank=self._world.rank, world_size=self._world.world_size)
        in_background = self._thread is not None and not wait
        about = Manifest(
            step=step,
            metric=metric,
            world_size=self._world.world_size,
            versions={"foundry": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
            **manifest,
        )
        if self._thread is not None:  # one that is waited for, too: tensor by tensor a GPU takes longer
            chunks = self._copies.take(chunks, from_host=in_background)
        job = _Save(about, chunks, rank_state, is_best, begin)
        if self._thread is not None and in_background:
            self._pending = self._thread.submit(self._run, job)
        else:
            self._is_waited_for = True
            self._run(job)
            self._is_waited_for = False
        self.blocked_seconds = time.perf_counter() - begin
        if wait:
            self._raise_error()

    def finish(self) -> None:
        """Wait until everything is on the disk.

        Raises:
            SaveError: the last save failed.
        """
        self.join()
        self._raise_error()

    def join(self) -> None:
        """Wait until nothing is being written, whatever has become of it."""
        if self._pending is not None:
            self._is_waited_for = True
            self._pending.result()
            self._pending, self._is_waited_for = None, False

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, job: _Save) -> None:
        """Save, and turn what goes wrong into a line and a number."""
        step = job.manifest.step
        try:
            self._write(job)
        except Exception as error:
            self.failed_saves += 1
            folder = self.run_dir / CHECKPOINTS / step_name(step)
            self._error = SaveError(f"no checkpoint of step {step} at {folder}: {error}")
            if self._world.is_main:
                shutil.rmtree(partial_path(self.run_dir, step), ignore_errors=True)
                log.error("%s; earlier checkpoints stay", self._error)
        self.seconds = time.perf_counter() - job.begin

    def _write(self, job: _Save) -> None:
        """All ranks together; each step begins when all have done the one before."""
        is_there = self._together(partial(self._on_main, self._prepare, job.manifest.step))[0]
        folder = self.run_dir / CHECKPOINTS / step_name(job.manifest.step)
        if is_there and not damage_together(folder, self._world, self._group):
            self._together(partial(self._on_main, self._point_to, folder, job.is_best))
            return
        files: dict[str, FileFacts] = {}
        for part in self._together(partial(self._write_files, job)):
            files |= part
        self._together(partial(self._on_main, self._publish, job, files))

    def _prepare(self, step: int) -> bool:
        """Make room for a checkpoint, and return whether there is one of this step."""
        self._check_run_dir()
        remove_leftovers(self.run_dir)
        partial = partial_path(self.run_dir, step)
        make_folder(partial.parent, parents=True)
        partial.mkdir()
        return (partial.parent / step_name(step)).exists()

    def _write_files(self, job: _Save) -> dict[str, FileFacts]:
        folder, rank = partial_path(self.run_dir, job.manifest.step), f"{self._world.rank:05d}"
        shard = f"shard-{rank}.safetensors"
        return {
            shard: write_shard(folder / shard, job.chunks, self._tell_alive),
            f"rank-{rank}.json": write_json(folder / f"rank-{rank}.json", job.rank_state),
        }

    def _tell_alive(self) -> None:
        """While training goes on it has to show that itself."""
        if self._alive is not None and self._is_waited_for:
            self._alive()

    def _publish(self, job: _Save, files: Mapping[str, FileFacts]) -> None:
        partial = partial_path(self.run_dir, job.manifest.step)
        index = write_durably(partial / INDEX, build_index(partial))
        about = Manifest(**{**vars(job.manifest), "files": {**files, INDEX: index}})
        self._point_to(publish(partial, about), job.is_best)

    def _point_to(self, folder: Path, is_best: bool) -> None:
        """Set the links, then delete what is no longer wanted."""
        link(folder, LATEST)
        if is_best:
            link(folder, BEST)
        # Of later steps are only those that a run which went back has left.
        earlier = {parse_step(other): other for other in list_checkpoints(self.run_dir)}
        steps = [step for step in earlier if step <= parse_step(folder)]
        unwanted = to_remove(
            steps,
            keep_last=self._keep_last,
            keep_every_steps=self._keep_every_steps,
            best=linked_step(self.run_dir, BEST),
        )
        try:
            for step in unwanted:
                remove(earlier[step])
            remove_leftovers(self.run_dir)
        except OSError as error:
            log.warning("%s could not be deleted and will be tried again: %s", error.filename, error.strerror)

    def _on_main(self, work: Callable[..., _T], *args: Any) -> _T | None:
        return work(*args) if self._world.is_main else None

    def _together(self, work: Callable[[], _T]) -> Sequence[_T]:
        return together(work, self._world, self._group)


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
