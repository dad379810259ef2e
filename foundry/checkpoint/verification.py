"""Finding the newest whole checkpoint, all ranks together."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch.distributed import ProcessGroup

from foundry.checkpoint.folder import CheckpointError, examine
from foundry.parallel.gathering import gather
from foundry.parallel.process_group import World
from foundry.run_dir.checkpoints import list_checkpoints

log = logging.getLogger(__name__)
_T = TypeVar("_T")


def verify_newest(run_dir: Path, world: World) -> Path | None:
    """The newest checkpoint that is whole; each newer one that is damaged is named in the log, with what is wrong.

    Every byte is read once, each rank reading its share of the files.

    Args:
        run_dir: the run directory, where all ranks see it.
        world: all its ranks call this together, and learn the same.

    Raises:
        CheckpointError: one cannot be read, which says nothing about whether it is whole.
    """
    # Rank 0's list: another rank's view of a shared file system may be older.
    for folder in together(partial(list_checkpoints, run_dir), world)[0]:
        damage = damage_together(folder, world)
        if not damage:
            return folder
        if world.is_main:
            log.error("%s is not whole and is not used: %s", folder, "; ".join(damage))
    return None


def damage_together(folder: Path, world: World, group: ProcessGroup | None = None) -> list[str]:
    """What of a checkpoint is damaged, known to every rank after all have looked at their share of its files.

    Args:
        folder: the checkpoint.
        world: all its ranks call this together.
        group: over which they speak; None: the default.

    Raises:
        CheckpointError: it cannot be read; on every rank.
    """
    found = gather(examine(folder, part=world.rank, num_parts=world.world_size), world, group)
    problems = {problem for part in found for problem in part}
    if unreadable := sorted(problem.message for problem in problems if not problem.is_damage):
        raise CheckpointError(f"{folder}: {'; '.join(unreadable)}")
    return sorted(problem.message for problem in problems)


def together(work: Callable[[], _T], world: World, group: ProcessGroup | None = None) -> Sequence[_T]:
    """Every rank's result; if any rank failed, all raise the same.

    Raises:
        CheckpointError: names the ranks and their reasons.
    """
    result: _T | None = None
    reason: str | None = None
    try:
        result = work()
    except Exception as error:
        reason = f"rank {world.rank}: {type(error).__name__}: {error}"
    text = gather((result, reason), world, group)
    if reasons := [reason for _, reason in text if reason is not None]:
        raise CheckpointError("; ".join(reasons))
    return [result for result, _ in text]  # type: ignore[misc]
