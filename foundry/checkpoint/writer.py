"""Writing of one checkpoint by all ranks: its files, its publication on every disk, and the deletion of old ones."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from torch.distributed import ProcessGroup

from foundry.checkpoint.exchange import find_damage
from foundry.checkpoint.folder import (
    FileFacts,
    Manifest,
    encode_manifest,
    link,
    partial_path,
    publish,
    publish_encoded,
    write_durably,
    write_json,
)
from foundry.checkpoint.mirror.thread import Mirror
from foundry.checkpoint.retention import remove, remove_leftovers, to_remove
from foundry.checkpoint.shard import Chunk, write_shard
from foundry.checkpoint.tensor_index import INDEX, build_index, merge_headers, read_header
from foundry.checkpoint.verification import together
from foundry.parallel.process_group import World
from foundry.run_dir.checkpoints import BEST, LATEST, linked_step, list_checkpoints, parse_step, step_name
from foundry.run_dir.files import make_folder
from foundry.run_dir.names import CHECKPOINTS

log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True)
class NewCheckpoint:
    """One checkpoint, as this rank writes it.

    Attributes:
        manifest: the manifest without files.
        chunks: tensors that this rank writes, by name.
        rank_state: state of this rank, as plain JSON.
        is_best: whether to point the symlink `best` to this checkpoint.
    """

    manifest: Manifest
    chunks: Mapping[str, Chunk]
    rank_state: Mapping[str, Any]
    is_best: bool


class CheckpointWriter:
    """Writer of checkpoints into a run directory; all ranks call `write` together."""

    def __init__(
        self,
        run_dir: Path,
        world: World,
        group: ProcessGroup | None,
        *,
        keep_last: int | None,
        keep_every_steps: int | None,
        check_run_dir: Callable[[], None],
        alive: Callable[[], None],
        mirror: Mirror | None,
    ) -> None:
        """Prepare to write.

        Args:
            run_dir: the run directory.
            world: this rank and its process group.
            group: process group for the communication; None for the default group.
            keep_last: as in `Checkpointer`.
            keep_every_steps: as in `Checkpointer`.
            check_run_dir: as in `Checkpointer`.
            alive: heartbeat, called for each piece of a file that is written.
            mirror: as in `Checkpointer`.
        """
        self._run_dir, self._world, self._group = run_dir, world, group
        self._keep_last, self._keep_every_steps = keep_last, keep_every_steps
        self._check_run_dir, self._alive, self._mirror = check_run_dir, alive, mirror

    def write(self, checkpoint: NewCheckpoint) -> None:
        """Write a checkpoint in phases; a phase begins when all ranks have completed the previous one.

        If an intact checkpoint of this step exists, only update symlinks and delete old checkpoints.

        Raises:
            CheckpointError: on every rank, if any rank cannot write its part.
        """
        step = checkpoint.manifest.step
        exists = self._run_together(lambda: self._prepare(step) if self._world.leads_disk else None)[0]
        folder = self._run_dir / CHECKPOINTS / step_name(step)
        if exists and not find_damage(folder, self._world, self._group):
            kept = self._from_main(partial(self._point_to, folder, checkpoint.is_best))
        else:
            files: dict[str, FileFacts] = {}
            for part in self._run_together(partial(self._write_files, checkpoint)):
                files |= part
            if self._world.disks is None:
                kept = self._from_main(partial(self._publish, checkpoint, files))
            else:
                kept = self._publish_on_all_disks(checkpoint, files)
        if self._world.disks is not None:
            self._run_together(partial(self._on_other_disks, self._follow, folder, checkpoint.is_best, kept))
        if self._mirror is not None:
            self._mirror.notify()

    def _prepare(self, step: int) -> bool:
        """Create a new checkpoint's temporary folder, and return whether a checkpoint of this step already exists."""
        self._check_run_dir()
        remove_leftovers(self._run_dir)
        partial = partial_path(self._run_dir, step)
        try:
            make_folder(partial.parent)
            partial.mkdir()
        except FileNotFoundError:
            self._check_run_dir()
            raise
        return (partial.parent / step_name(step)).exists()

    def _write_files(self, checkpoint: NewCheckpoint) -> dict[str, FileFacts]:
        folder, rank = partial_path(self._run_dir, checkpoint.manifest.step), f"{self._world.rank:05d}"
        shard = f"shard-{rank}.safetensors"
        return {
            shard: write_shard(folder / shard, checkpoint.chunks, self._alive),
            f"rank-{rank}.json": write_json(folder / f"rank-{rank}.json", checkpoint.rank_state),
        }

    def _publish(self, checkpoint: NewCheckpoint, files: Mapping[str, FileFacts]) -> Sequence[int]:
        partial = partial_path(self._run_dir, checkpoint.manifest.step)
        index = write_durably(partial / INDEX, build_index(partial))
        manifest = Manifest(**{**vars(checkpoint.manifest), "files": {**files, INDEX: index}})
        return self._point_to(publish(partial, manifest), checkpoint.is_best)

    def _publish_on_all_disks(self, checkpoint: NewCheckpoint, files: Mapping[str, FileFacts]) -> Sequence[int]:
        """Publish a checkpoint on every disk with the same index and manifest; on the disk of rank 0 last.

        A checkpoint counts only if it is on the disk of rank 0, so an interruption leaves none that some disks lack.
        """
        step = checkpoint.manifest.step
        temporary = partial_path(self._run_dir, step)
        shards = [f"shard-{rank:05d}.safetensors" for rank in range(self._world.world_size)]
        headers = self._run_together(lambda: read_header(temporary / shards[self._world.rank]))

        def write_index() -> FileFacts:
            return write_durably(temporary / INDEX, merge_headers(dict(zip(shards, headers, strict=True))))

        def describe_checkpoint() -> str:
            return encode_manifest(Manifest(**{**vars(checkpoint.manifest), "files": {**files, INDEX: write_index()}}))

        manifest = self._from_main(describe_checkpoint)

        def publish_other() -> None:
            write_index()
            publish_encoded(temporary, step, manifest)

        self._run_together(partial(self._on_other_disks, publish_other))
        return self._from_main(lambda: self._point_to(publish_encoded(temporary, step, manifest), checkpoint.is_best))

    def _point_to(self, folder: Path, is_best: bool) -> Sequence[int]:
        """Point the symlinks to a checkpoint, then delete the checkpoints that the retention settings do not keep.

        Returns:
            Steps of the remaining checkpoints.
        """
        self._link(folder, is_best)
        held_step = None if self._mirror is None else self._mirror.held_step
        self._remove([other for step, other in self._old_checkpoints(folder).items() if step != held_step])
        return [parse_step(other) for other in list_checkpoints(self._run_dir)]

    def _follow(self, folder: Path, is_best: bool, kept: Sequence[int]) -> None:
        """Point the symlinks of this disk, and delete old checkpoints that rank 0 does not keep.

        Args:
            folder: the new checkpoint.
            is_best: whether to point the symlink `best` to it.
            kept: steps of the checkpoints on the disk of rank 0, including one that is being copied to a store.
        """
        self._link(folder, is_best)
        self._remove([other for step, other in self._old_checkpoints(folder).items() if step not in kept])

    def _old_checkpoints(self, folder: Path) -> dict[int, Path]:
        """Return the checkpoints on this disk that the retention settings do not keep after a new one, by step."""
        # Checkpoints of later steps exist only if the run went back to an earlier step; `keep_last` does not count
        # them.
        earlier = {parse_step(other): other for other in list_checkpoints(self._run_dir)}
        old_steps = to_remove(
            [step for step in earlier if step <= parse_step(folder)],
            keep_last=self._keep_last,
            keep_every_steps=self._keep_every_steps,
            best=linked_step(self._run_dir, BEST),
        )
        return {step: earlier[step] for step in old_steps}

    def _link(self, folder: Path, is_best: bool) -> None:
        link(folder, LATEST)
        if is_best:
            link(folder, BEST)

    def _remove(self, folders: Sequence[Path]) -> None:
        try:
            for folder in folders:
                remove(folder)
            remove_leftovers(self._run_dir)
        except OSError as error:
            log.warning("%s could not be deleted; the next save tries again: %s", error.filename, error.strerror)

    def _on_other_disks(self, work: Callable[..., _T], *args: Any) -> _T | None:
        return work(*args) if self._world.leads_disk and not self._world.is_main else None

    def _from_main(self, work: Callable[[], _T]) -> _T:
        """Call a function on rank 0, and return its result on every rank."""
        return cast(_T, self._run_together(lambda: work() if self._world.is_main else None)[0])

    def _run_together(self, work: Callable[[], _T]) -> Sequence[_T]:
        return together(work, self._world, self._group)
