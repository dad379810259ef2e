"""Which checkpoints are kept, and how the others go."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from foundry.checkpoint.folder import removed_path
from foundry.run_dir.names import CHECKPOINTS


def to_remove(
    checkpoints: Iterable[int], *, keep_last: int | None, keep_every_steps: int | None, best: int | None
) -> list[int]:
    """The steps whose checkpoints are no longer wanted, oldest first; never the newest and never the best.

    Args:
        checkpoints: steps of those there are.
        keep_last: how many of the newest are kept, at least 1; None: all.
        keep_every_steps: multiples of this are kept for good; None: there are none.
        best: the step that is kept whatever its age.
    """
    steps = sorted(set(checkpoints))
    if keep_last is None:
        return []
    newest = steps[-max(keep_last, 1) :]
    kept = {*newest, best} | {step for step in steps if keep_every_steps and step % keep_every_steps == 0}
    return [step for step in steps if step not in kept]


def remove(folder: Path) -> None:
    """Delete a checkpoint: first its name, so that what a kill leaves behind looks like no checkpoint."""
    removed = removed_path(folder)
    if removed.exists():
        shutil.rmtree(removed)
    folder.rename(removed)
    shutil.rmtree(removed)


def remove_leftovers(run_dir: Path) -> None:
    """Delete what interrupted saves and removals have left."""
    for pattern in (".step_*.partial", ".step_*.removed"):
        for folder in (run_dir / CHECKPOINTS).glob(pattern):
            if folder.is_symlink() or not folder.is_dir():
                folder.unlink()  # what it leads to is not ours
            else:
                shutil.rmtree(folder)
