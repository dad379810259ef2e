"""Thread of a rank above 0: it copies the shards of its rank."""

from collections.abc import Collection
from typing import Any

from foundry.checkpoint.mirror.thread import BEGUN, Mirror, MirroredRun
from foundry.run_dir.checkpoints import MANIFEST
from foundry.run_dir.mirror.lease import LEASE
from foundry.run_dir.mirror.snapshot import PUBLISHED, folder_of
from foundry.run_dir.mirror.store import MissingObjectError


class RankMirror(Mirror):
    """The thread of a rank above 0: it copies the shards of this rank, of the checkpoints that rank 0 announces.

    Args:
        run: the run and its store.
        rank: rank of this process.
        damaged: steps of damaged checkpoints in the store, which rank 0 copies again if the run saves them again.
    """

    def __init__(self, run: MirroredRun, rank: int, damaged: Collection[int] = ()) -> None:
        super().__init__(run, rank)
        self._damaged, self._done, self._begun = set(damaged), set[int](), dict[int, dict[str, Any]]()

    def _end(self) -> None:
        """Do nothing: the lease belongs to rank 0."""

    def _copy(self) -> bool:
        pending = [step for step in self._local_steps() if step not in self._done]
        for step in pending:
            begun = self._read_begun(step)
            if begun is not None:
                if begun != self._begun.get(step) and begun["manifest"] == self._manifest_checksum(step):
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

    def _read_begun(self, step: int) -> dict[str, Any] | None:
        """Return the announcement of a checkpoint; None if rank 0 does not copy it now."""
        try:
            begun = self._store.read_json(f"{folder_of(step)}/{BEGUN}")
        except (MissingObjectError, ValueError):
            return None
        return begun if "manifest" in begun else None
