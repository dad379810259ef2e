"""Threads that copy a run directory into a store while the run trains; training never waits for them."""

import logging
import math
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from foundry.checkpoint.folder import CheckpointError, FileFacts, Manifest, read_manifest
from foundry.checkpoint.retention import to_remove
from foundry.run_dir.checkpoints import LATEST as LATEST_LINK
from foundry.run_dir.checkpoints import MANIFEST, linked_step, list_checkpoints, names_in, parse_step, step_name
from foundry.run_dir.files import read_bytes
from foundry.run_dir.lock import RunDirectoryLostError, check_locked
from foundry.run_dir.mirror.copying import Copier
from foundry.run_dir.mirror.lease import LEASE, Lease
from foundry.run_dir.mirror.snapshot import (
    FILES,
    LATEST,
    OF_THE_END,
    PUBLISHED,
    Part,
    Snapshot,
    folder_of,
    newest_files,
    step_of,
    unreferenced,
)
from foundry.run_dir.mirror.store import MissingObjectError, Store, StoreError
from foundry.run_dir.names import CHECKPOINTS

BEGUN = "begun.json"
"""Object that rank 0 writes to start the copy of a checkpoint on the other ranks; its content differs each time."""

_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS = 1.0, 60.0
_WARNING_SECONDS = 600.0
_POLL_SECONDS, _LONGEST_POLL_SECONDS = 1.0, 10.0
_OTHER_RANKS_SECONDS = 120.0
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


class Mirror(ABC):
    """A thread that copies the files of this rank.

    Attributes:
        run_dir: the run directory.
    """

    def __init__(self, store: Store, run_dir: Path, *, rank: int, world_size: int, seconds: float) -> None:
        """Prepare the thread; `start` starts it.

        Args:
            store: the store.
            run_dir: the run directory.
            rank: rank of this process.
            world_size: number of ranks.
            seconds: longest wait at the end of the run for the copy under way.
        """
        self.run_dir, self._store = run_dir, store
        self._rank, self._world_size, self._seconds = rank, world_size, seconds
        self._copier, self._outage = Copier(store), _Outage(store.url, rank == 0)
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
        delay, poll = _FIRST_DELAY_SECONDS, _POLL_SECONDS
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
                    time.sleep(_POLL_SECONDS)
                delay = min(2 * delay, _LONGEST_DELAY_SECONDS)
                continue
            if is_complete and is_last:
                self._end()
                return
            if not self._is_closing.is_set() or not is_complete:
                is_notified = self._wakeup.wait(None if is_complete else poll)
                is_urgent = is_notified or self._is_closing.is_set()
                poll = _POLL_SECONDS if is_urgent else min(2 * poll, _LONGEST_POLL_SECONDS)
            self._wakeup.clear()

    @abstractmethod
    def _copy(self) -> bool:
        """Copy files that the store lacks; return whether nothing is left to copy."""

    @abstractmethod
    def _end(self) -> None:
        """Release the store after the last copy."""

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
        own = [name for name in facts if _writer(name, self._world_size) == self._rank]
        return {
            name: self._copier.copy_checkpoint_file(folder / name, step, facts[name].bytes, facts[name].checksum)
            for name in own
        }

    def _manifest_checksum(self, step: int) -> str:
        return xxhash.xxh3_128_hexdigest(read_bytes(self._folder(step) / MANIFEST))

    def _folder(self, step: int) -> Path:
        return self.run_dir / CHECKPOINTS / step_name(step)


class RankMirror(Mirror):
    """The thread of a rank above 0: it copies the shards of this rank, of the checkpoints that rank 0 announces."""

    def __init__(
        self, store: Store, run_dir: Path, *, rank: int, world_size: int, seconds: float, damaged: Collection[int] = ()
    ) -> None:
        """Prepare the thread; `start` starts it.

        Args:
            store: the store.
            run_dir: the run directory.
            rank: rank of this process.
            world_size: number of ranks.
            seconds: longest wait at the end of the run for the copy under way.
            damaged: steps of damaged checkpoints in the store, which rank 0 copies again if the run saves them again.
        """
        super().__init__(store, run_dir, rank=rank, world_size=world_size, seconds=seconds)
        self._damaged, self._done, self._begun = set(damaged), set[int](), dict[int, bytes]()

    def _end(self) -> None:
        """Do nothing: the lease belongs to rank 0."""

    def _copy(self) -> bool:
        pending = [step for step in self._local_steps() if step not in self._done]
        for step in pending:
            begun = self._read_begun(step)
            if begun is not None:
                if begun != self._begun.get(step):
                    self._copy_own(step, self._facts(step)[1])
                    self._begun[step] = begun
                    self._damaged.discard(step)
                    self.notify()  # rank 0 may begin another one soon
            elif step not in self._damaged and self._is_published(step):
                self._done.add(step)
        if self._is_closing.is_set():
            return self._store.size(LEASE) is None  # rank 0 has copied the last files
        return self._done.issuperset(pending)

    def _is_published(self, step: int) -> bool:
        """Return whether the store has this checkpoint of the run directory, and not another one of the same step."""
        names = (PUBLISHED, f"{MANIFEST}.{self._manifest_checksum(step)}")
        return all(self._store.size(f"{folder_of(step)}/{name}") is not None for name in names)

    def _read_begun(self, step: int) -> bytes | None:
        """Return the announcement of a checkpoint; None if rank 0 does not copy it now."""
        try:
            return self._store.read(f"{folder_of(step)}/{BEGUN}")
        except MissingObjectError:
            return None


@dataclass(kw_only=True)
class MirrorState:
    """Content of a store when a run starts.

    Attributes:
        run: identity of the run.
        published: complete checkpoints by step.
        latest: snapshot of the small files; None if it was never written.
        damaged: steps of damaged checkpoints, which are copied again if the run saves them again.
    """

    run: str
    published: dict[int, Snapshot] = field(default_factory=dict)
    latest: Snapshot | None = None
    damaged: set[int] = field(default_factory=set)


class MainMirror(Mirror):
    """The thread of rank 0: it also copies the small files, publishes each checkpoint, and deletes old ones."""

    def __init__(
        self,
        store: Store,
        run_dir: Path,
        state: MirrorState,
        lease: Lease,
        *,
        world_size: int,
        seconds: float,
        identity: Mapping[str, bytes],
        keep_last: int | None,
        keep_every_steps: int | None,
        excluded: Collection[Path] = (),
    ) -> None:
        """Prepare the thread; `start` starts it.

        Args:
            store: the store.
            run_dir: the run directory, which this process has locked.
            state: content of the store.
            lease: lease of the store, which this process has.
            world_size: number of ranks.
            seconds: longest wait at the end of the run for the copy under way.
            identity: objects to write before any other, with their contents.
            keep_last: as in `Checkpointer`.
            keep_every_steps: as in `Checkpointer`.
            excluded: folders that are not copied.
        """
        super().__init__(store, run_dir, rank=0, world_size=world_size, seconds=seconds)
        self._state, self._lease, self._identity = state, lease, dict(identity)
        self._keep_last, self._keep_every_steps, self._excluded = keep_last, keep_every_steps, excluded
        snapshots = [*state.published.values(), *([state.latest] if state.latest is not None else [])]
        self._objects = {name for snapshot in snapshots for name in snapshot.objects}
        self._files = dict(next(iter(newest_files(*snapshots)), {}))
        self._number = max((snapshot.number for snapshot in snapshots), default=0)
        self._unreadable, self._uncleaned = set[int](), set[int]()
        self._is_listed = False
        self._held: int | None = None

    @property
    def held_step(self) -> int | None:
        """Step of the checkpoint that is copied now, which must not be deleted; None if no checkpoint is copied."""
        return self._held

    def close(self) -> None:
        """Wait as in `Mirror`, then stop the heartbeats: a thread that still copies ends at its next check."""
        super().close()
        if self._thread is not None:
            self._lease.abandon()

    def _copy(self) -> bool:
        check_locked(self.run_dir)
        self._require_lease()
        if not self._is_listed:  # a process that was killed may have left objects that no snapshot contains
            self._objects |= {f"{FILES}/{name}" for name in self._store.sizes(FILES)}
            self._is_listed = True
        while self._identity:
            name, content = next(iter(self._identity.items()))
            self._store.write(name, content)
            del self._identity[name]
        while True:
            self._publish_all()
            self._copy_small_files()
            if self._next_step() is None:  # otherwise the result may belong to a checkpoint that is not copied yet
                break
        self._write_latest()
        self._remove_old()
        return True

    def _publish_all(self) -> None:
        """Publish the checkpoints on disk, the newest first."""
        while (step := self._next_step()) is not None:
            try:
                self._held = step
                self._publish(step)
            except StoreError:
                raise
            except (CheckpointError, OSError) as error:
                if self._folder(step).is_dir():
                    self._unreadable.add(step)
                    log.warning("%s is not copied to %s: %s", self._folder(step), self._store.url, error)
            finally:
                self._held = None

    def _next_step(self) -> int | None:
        """Return the newest checkpoint on disk that the store lacks and the retention settings keep; None without."""
        local, published = self._local_steps(), self._state.published
        if not local:
            return None
        left_out = {*self._old_steps([*local, *published], local[0]), *self._unreadable}
        return next((step for step in local if step not in left_out and not self._is_published(step)), None)

    def _is_published(self, step: int) -> bool:
        """Return whether the store has this checkpoint of the run directory, and not another one of the same step."""
        snapshot = self._state.published.get(step)
        part = None if snapshot is None else snapshot.checkpoint.get(MANIFEST)
        if part is None:
            return snapshot is not None
        try:
            return self._manifest_checksum(step) == part.checksum
        except OSError:
            return True

    def _best(self, step: int) -> int | None:
        """Return the best step that a checkpoint records; None if it records no best step."""
        try:
            best = read_manifest(self._folder(step)).state.get("best", {}).get("step")
        except (CheckpointError, OSError, AttributeError):
            snapshot = self._state.published.get(step)
            return None if snapshot is None else snapshot.best
        return best if isinstance(best, int) else None

    def _old_steps(self, steps: Collection[int], newest: int) -> list[int]:
        """Return the steps whose checkpoints the retention settings do not keep; `newest` if no link names the newest.

        As in the run directory, later steps than the newest do not count: the run has gone back from them.
        """
        linked = linked_step(self.run_dir, LATEST_LINK)
        newest = newest if linked is None else linked
        return to_remove(
            [step for step in steps if step <= newest],
            keep_last=self._keep_last,
            keep_every_steps=self._keep_every_steps,
            best=self._best(newest),
        )

    def _publish(self, step: int) -> None:
        """Copy a checkpoint and the small files, and publish both."""
        begin, before, place = time.monotonic(), self._copier.bytes, folder_of(step)
        _, facts = self._facts(step)
        if step in self._state.damaged:
            self._require_lease()
            self._store.remove(f"{place}/{PUBLISHED}")
            self._store.remove_folder(place)
            self._state.damaged.discard(step)
        if self._world_size > 1:
            self._store.write(f"{place}/{BEGUN}", uuid.uuid4().hex.encode())
        own = self._copy_own(step, facts)
        parts = {
            name: own.get(name, Part(f"{place}/{name}.{fact.checksum}", fact.bytes, fact.checksum))
            for name, fact in facts.items()
        }
        if len(own) < len(parts):
            self._wait_for(step, parts)
        self._copy_small_files(*OF_THE_END)
        snapshot = self._snapshot(step, self._best(step), parts)
        self._require_lease()
        self._store.write(f"{place}/{PUBLISHED}", snapshot.encode())
        self._state.published[step] = snapshot
        self._uncleaned.add(step)
        seconds, copied = time.monotonic() - begin, self._copier.bytes - before
        log.info("copied step %d to %s: %d bytes in %.1f s", step, self._store.url, copied, seconds)
        self._write_latest()
        self._remove_old()

    def _wait_for(self, step: int, parts: Mapping[str, Part]) -> None:
        """Wait until the other ranks have copied their files of a checkpoint.

        Raises:
            StoreError: no further file was copied for two minutes.
        """
        place, missing, since = folder_of(step), len(parts), time.monotonic()
        while True:
            sizes = self._store.sizes(place)
            left = [name for name, part in parts.items() if sizes.get(f"{name}.{part.checksum}") != part.bytes]
            if not left:
                return
            if len(left) < missing:
                missing, since = len(left), time.monotonic()
            if time.monotonic() - since > _OTHER_RANKS_SECONDS:
                raise StoreError(f"{left[0]} of step {step} has not been copied by its rank")
            time.sleep(_POLL_SECONDS)

    def _copy_small_files(self, *left_out: str) -> None:
        # A file that is gone stays in the snapshot: the directory may be about to disappear.
        self._files |= self._copier.copy_small_files(self.run_dir, self._files, self._excluded, left_out)
        self._objects |= Snapshot(run=self._state.run, files=self._files).objects
        check_locked(self.run_dir)

    def _snapshot(self, step: int | None, best: int | None, checkpoint: Mapping[str, Part] | None = None) -> Snapshot:
        """Return a snapshot of the small files as copied last, with a checkpoint or None."""
        self._number += 1
        run, files, number = self._state.run, dict(self._files), self._number
        snapshot = Snapshot(run=run, step=step, best=best, checkpoint=checkpoint or {}, files=files, number=number)
        return snapshot if checkpoint is None else snapshot.without_end()

    def _write_latest(self) -> None:
        """Replace the snapshot of the small files if any has changed."""
        newest = max(self._state.published, default=None)
        best = None if newest is None else self._state.published[newest].best
        before = self._state.latest
        if before is None or (before.step, before.best, before.files) != (newest, best, self._files):
            latest = self._snapshot(newest, best)
            self._require_lease()
            self._store.write(LATEST, latest.encode())
            self._state.latest = latest

    def _remove_old(self) -> None:
        """Delete checkpoints that the retention settings do not keep, incomplete ones, and objects without use.

        Does nothing if that is done since the last checkpoint was published.
        """
        if not self._uncleaned:
            return
        self._require_lease()
        published, local = self._state.published, set(self._local_steps())
        newest = max(published)
        for step in self._old_steps(published, newest):  # a newer one that is not published yet does not count
            self._store.remove(f"{folder_of(step)}/{PUBLISHED}")
            del published[step]
        kept = {*published, *local.difference(self._old_steps({*published, *local}, newest))}
        for name in self._store.names(CHECKPOINTS):
            other = step_of(name)
            if other is not None and other < newest and other not in kept:
                self._store.remove_folder(folder_of(other))
        for step in self._uncleaned.intersection(published):
            place = folder_of(step)
            used = {part.object for part in published[step].checkpoint.values()} | {f"{place}/{PUBLISHED}"}
            self._store.remove(*({f"{place}/{name}" for name in self._store.sizes(place)} - used))
        latest = [self._state.latest] if self._state.latest is not None else []
        unused = unreferenced(self._objects, [*published.values(), *latest])
        self._store.remove(*unused)
        self._objects -= unused
        self._uncleaned.clear()

    def _require_lease(self) -> None:
        if not self._lease.check():
            if self._lease.is_lost:
                log.error("another process has written to %s; this one copies nothing more", self._store.url)
            raise LeaseLostError

    def _end(self) -> None:
        self._lease.release()


def _writer(name: str, world_size: int) -> int:
    """Return the rank that copies a file of a checkpoint: its own for a shard or a rank's state, otherwise 0."""
    stem, _, number = name.partition(".")[0].rpartition("-")
    is_of_a_rank = stem in ("shard", "rank") and number.isdecimal() and int(number) < world_size
    return int(number) if is_of_a_rank else 0
