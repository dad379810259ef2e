"""Verification of checkpoints by all ranks together, and search for the newest intact one."""

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


def verify_newest(
    run_dir: Path, world: World, examine_together: Callable[[Path, World], list[str]] | None = None
) -> Path | None:
    """Return a run's newest intact checkpoint, or None; damaged checkpoints that are newer are logged with the damage.

    Every byte of the examined checkpoints is read once: the files are divided among the ranks.

    Args:
        run_dir: the run directory, on a file system that all ranks share.
        world: all its ranks call this function together and get the same result.
        examine_together: returns the damage of a checkpoint, called on all ranks; None for `find_damage_on_all_ranks`.

    Raises:
        CheckpointError: if a checkpoint cannot be read, so that it is unknown whether it is intact.
    """
    # Use the listing of rank 0, since the view of a shared file system may be stale on other ranks.
    for folder in together(partial(list_checkpoints, run_dir), world)[0]:
        damage = (examine_together or find_damage_on_all_ranks)(folder, world)
        if not damage:
            return folder
        if world.is_main:
            log.error("%s is damaged and not used: %s", folder, "; ".join(damage))
    return None


def find_damage_on_all_ranks(folder: Path, world: World, group: ProcessGroup | None = None) -> list[str]:
    """Return the damage of a checkpoint, a line each.

    Every rank checks its share of the files and gets the whole list.

    Args:
        folder: the checkpoint.
        world: all its ranks call this function together.
        group: process group for the communication; None for the default group.

    Raises:
        CheckpointError: on every rank, if the checkpoint cannot be read.
    """
    parts = gather(examine(folder, part=world.rank, num_parts=world.world_size), world, group)
    problems = {problem for part in parts for problem in part}
    if unreadable := sorted(problem.message for problem in problems if not problem.is_damage):
        raise CheckpointError(f"{folder}: {'; '.join(unreadable)}")
    return sorted(problem.message for problem in problems)


def together(work: Callable[[], _T], world: World, group: ProcessGroup | None = None) -> Sequence[_T]:
    """Call a function on every rank and return the results of all ranks; if it fails on any rank, all ranks raise.

    Raises:
        CheckpointError: on every rank, if any rank failed; the message has the failed ranks with their reasons.
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
