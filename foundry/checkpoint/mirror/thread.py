"""Thread of a rank that copies files of a run directory into a store; training never waits for it."""

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from foundry.checkpoint.folder import CheckpointError, FileFacts, Manifest, manifest_checksum, read_manifest
from foundry.run_dir.checkpoints import MANIFEST, list_checkpoints, names_in, parse_step, step_name
from foundry.run_dir.files import read_bytes
from foundry.run_dir.lock import RunDirectoryLostError
from foundry.run_dir.mirror.copying import Copier
from foundry.run_dir.mirror.snapshot import Part
from foundry.run_dir.mirror.store import Store
from foundry.run_dir.names import CHECKPOINTS

BEGUN = "begun.json"
"""Object that rank 0 writes to start the copy of a checkpoint on the other ranks.

It contains the checksum of the manifest, and differs each time.
"""

POLL_SECONDS = 1.0
"""Shortest interval between two looks at the store for the other ranks' objects."""

_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS = 1.0, 60.0
_WARNING_SECONDS = 600.0
_LONGEST_POLL_SECONDS = 10.0
log = logging.getLogger(__name__)


class LeaseLostError(RuntimeError):
    """Another process has begun to write to the store, or this one has given its lease back."""


@dataclass
class _Outage:
    """Warnings of a store that cannot be used: the first at once, further ones every ten minutes."""

    url: str
    is_main: bool
    _begin: float | None = None
    _warned: float = -math.inf

    def warn(self, error: Exception) -> None:
        now = time.monotonic()
        self._begin = now if self._begin is None else self._begin
        if self.is_main and now - self._warned >= _WARNING_SECONDS:
            self._warned = now
            log.warning("the copy to %s waits: %s; training continues, and the copy is caught up on", self.url, error)

    def end(self) -> None:
        if self._begin is not None and self.is_main:
            seconds = time.monotonic() - self._begin
            log.info("%s can be written again after %.0f s; the copy is caught up on", self.url, seconds)
        self._begin = None


@dataclass(frozen=True, kw_only=True)
class MirroredRun:
    """A run and the store that receives its copy.

    Attributes:
        store: the store.
        run_dir: the run directory.
        world_size: number of ranks.
        seconds: longest wait at the end of the run for the copy under way.
    """

    store: Store
    run_dir: Path
    world_size: int
    seconds: float


class Mirror(ABC):
    """A thread that copies the files of this rank.

    Args:
        run: the run and its store.
        rank: rank of this process.

    Attributes:
        run_dir: the run directory.
    """

    def __init__(self, run: MirroredRun, rank: int) -> None:
        self.run_dir, self._store = run.run_dir, run.store
        self._rank, self._world_size, self._seconds = rank, run.world_size, run.seconds
        self._copier, self._outage = Copier(run.store), _Outage(run.store.url, rank == 0)
        self._wakeup, self._is_closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def held_step(self) -> int | None:
        """Step of the checkpoint that is copied now, which must not be deleted; None if no checkpoint is copied."""
        return None

    def start(self) -> None:
        """Start to copy."""
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self._thread.start()
        self.notify()

    def notify(self) -> None:
        """Tell the thread that a checkpoint is on disk; returns at once."""
        self._wakeup.set()

    def close(self) -> None:
        """Wait for the copy of the last files, but not longer than `checkpoint.mirror_seconds`."""
        if self._thread is not None:
            self._is_closing.set()
            self.notify()
            self._thread.join(self._seconds)
            if self._thread.is_alive() and self._rank == 0:
                message = "the copy to %s is incomplete after %g s (checkpoint.mirror_seconds); %s has all files"
                log.warning(message, self._store.url, self._seconds, self.run_dir)

    def _run(self) -> None:
        delay, poll = _FIRST_DELAY_SECONDS, POLL_SECONDS
        while True:
            is_last = self._is_closing.is_set()
            try:
                is_complete = self._copy()
                self._outage.end()
                delay = _FIRST_DELAY_SECONDS
            except LeaseLostError:
                return
            except RunDirectoryLostError:
                self._end()
                return
            except Exception as error:  # of any library below the store; none may end the run
                self._outage.warn(error)
                if self._is_closing.wait(delay):
                    time.sleep(POLL_SECONDS)
                delay = min(2 * delay, _LONGEST_DELAY_SECONDS)
                continue
            if is_complete and is_last:
                self._end()
                return
            if not self._is_closing.is_set() or not is_complete:
                is_notified = self._wakeup.wait(None if is_complete else poll)
                is_urgent = is_notified or self._is_closing.is_set()
                poll = POLL_SECONDS if is_urgent else min(2 * poll, _LONGEST_POLL_SECONDS)
            self._wakeup.clear()

    @abstractmethod
    def _copy(self) -> bool:
        """Copy files that the store lacks; return whether nothing is left to copy."""

    @abstractmethod
    def _end(self) -> None:
        """Release the store after the last copy."""

    def copyable(self) -> dict[int, str]:
        """Return the steps of the checkpoints on disk that have all files which this rank copies.

        Each step has the checksum of its manifest; ranks on different disks compare it.
        """
        steps = map(parse_step, list_checkpoints(self.run_dir))
        return {step: checksum for step in steps if (checksum := self._checksum_if_present(step)) is not None}

    def _checksum_if_present(self, step: int) -> str | None:
        folder = self._folder(step)
        try:
            own = [name for name in read_manifest(folder).files if writer_of(name, self._world_size) == self._rank]
            return self._manifest_checksum(step) if all((folder / name).is_file() for name in own) else None
        except (CheckpointError, OSError):
            return None

    def _local_steps(self) -> list[int]:
        """Return the steps of the checkpoints on disk, highest first."""
        folders = list_checkpoints(self.run_dir)
        return [parse_step(folder) for folder in folders if MANIFEST in names_in(folder)]

    def _facts(self, step: int) -> tuple[Manifest, dict[str, FileFacts]]:
        """Return the manifest of a checkpoint, and size and checksum of all its files, the manifest included."""
        folder = self._folder(step)
        content = read_bytes(folder / MANIFEST)
        manifest = read_manifest(folder)
        own = FileFacts(len(content), xxhash.xxh3_128_hexdigest(content))
        return manifest, {**manifest.files, MANIFEST: own}

    def _copy_own(self, step: int, facts: Mapping[str, FileFacts]) -> dict[str, Part]:
        """Copy the files of a checkpoint that this rank has written."""
        folder = self._folder(step)
        own = [name for name in facts if writer_of(name, self._world_size) == self._rank]
        return {
            name: self._copier.copy_checkpoint_file(folder / name, step, facts[name].bytes, facts[name].checksum)
            for name in own
        }

    def _manifest_checksum(self, step: int) -> str:
        return manifest_checksum(self._folder(step))

    def _folder(self, step: int) -> Path:
        return self.run_dir / CHECKPOINTS / step_name(step)


def writer_of(name: str, world_size: int) -> int:
    """Return the rank that writes and copies a file of a checkpoint: 0, except for shards and states of ranks."""
    stem, _, number = name.partition(".")[0].rpartition("-")
    is_of_a_rank = stem in ("shard", "rank") and number.isdecimal() and int(number) < world_size
    return int(number) if is_of_a_rank else 0
