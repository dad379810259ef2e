"""Finding the newest whole checkpoint, all ranks together."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from foundry.checkpoint.folder import list_checkpoints, problems
from foundry.parallel.process_group import World

log = logging.getLogger(__name__)
_T = TypeVar("_T")


def verify_newest(run_dir: Path, world: World) -> Path | None:
    """The newest checkpoint that is whole; each newer one that is not is named in the log, with what is wrong.

    Every byte is read once, each rank reading its share of the files.

    Args:
        run_dir: the run directory, where all ranks see it.
        world: all its ranks call this together, and learn the same.
    """
    # Rank 0's list: another rank's view of a shared file system may be older.
    for folder in gather(list_checkpoints(run_dir), world)[0]:
        wrong = problems_together(folder, world)
        if not wrong:
            return folder
        if world.is_main:
            log.error("%s is not whole and is not used: %s", folder, "; ".join(wrong))
    return None


def problems_together(folder: Path, world: World, group: ProcessGroup | None = None) -> list[str]:
    """What is wrong with a checkpoint, known to every rank after all have looked at their share of its files.

    Args:
        folder: the checkpoint.
        world: all its ranks call this together.
        group: over which they speak; None: the default.
    """
    found = gather(problems(folder, part=world.rank, num_parts=world.world_size), world, group)
    return sorted({problem for part in found for problem in part})


def gather(value: _T, world: World, group: ProcessGroup | None = None) -> Sequence[_T]:
    """Every rank's value, by rank."""
    values: list[_T] = [value] * world.world_size
    if world.world_size > 1:
        dist.all_gather_object(values, value, group=group)
    return values
