"""Thread of rank 0: it copies its shards and the small files, publishes each checkpoint, and deletes old ones."""

import json
import logging
import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from foundry.checkpoint.folder import CheckpointError, read_manifest
from foundry.checkpoint.mirror import thread
from foundry.checkpoint.mirror.thread import BEGUN, LeaseLostError, Mirror, MirroredRun
from foundry.checkpoint.retention import to_remove
from foundry.run_dir.checkpoints import LATEST as LATEST_LINK
from foundry.run_dir.checkpoints import MANIFEST, linked_step
from foundry.run_dir.lock import check_locked
from foundry.run_dir.mirror.lease import Lease
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
from foundry.run_dir.mirror.store import StoreError
from foundry.run_dir.names import CHECKPOINTS

_OTHER_RANKS_SECONDS = 120.0
log = logging.getLogger(__name__)


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
        run: MirroredRun,
        state: MirrorState,
        lease: Lease,
        *,
        identity: Mapping[str, bytes],
        keep_last: int | None,
        keep_every_steps: int | None,
        excluded: Collection[Path] = (),
    ) -> None:
        """Prepare the thread; `start` starts it.

        Args:
            run: the run, whose directory this process has locked, and its store.
            state: content of the store.
            lease: lease of the store, which this process has.
            identity: objects to write before any other, with their contents.
            keep_last: as in `Checkpointer`.
            keep_every_steps: as in `Checkpointer`.
            excluded: folders that are not copied.
        """
        super().__init__(run, rank=0)
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

    def leave_out(self, steps: Collection[int]) -> None:
        """Exclude checkpoints that a rank cannot copy, because its files are missing; call this before `start`."""
        for step in sorted(set(steps).difference(self._state.published)):
            log.warning("step %d is not copied to %s: a rank lacks its files of it", step, self._store.url)
        self._unreadable |= set(steps)

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
            content = {"id": uuid.uuid4().hex, "manifest": facts[MANIFEST].checksum}
            self._store.write(f"{place}/{BEGUN}", json.dumps(content).encode())
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
            time.sleep(thread.POLL_SECONDS)

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
