"""Selection of the checkpoints to delete, and their deletion."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from foundry.run_dir.checkpoints import removed_path
from foundry.run_dir.names import CHECKPOINTS


def to_remove(
    checkpoints: Iterable[int], *, keep_last: int | None, keep_every_steps: int | None, best: int | None
) -> list[int]:
    """Return the steps whose checkpoints should be deleted, oldest first; never the newest and never the best.

    Args:
        checkpoints: steps of the existing checkpoints.
        keep_last: number of newest checkpoints to keep, at least 1; None keeps all.
        keep_every_steps: checkpoints at multiples of this number of steps are kept permanently; None disables this
            rule.
        best: step that is always kept; None if no checkpoint is the best one.
    """
    steps = sorted(set(checkpoints))
    if keep_last is None:
        return []
    newest = steps[-max(keep_last, 1) :]
    kept_steps = {*newest, best} | {step for step in steps if keep_every_steps and step % keep_every_steps == 0}
    return [step for step in steps if step not in kept_steps]


def remove(folder: Path) -> None:
    """Delete a checkpoint; it is renamed first, so that an interrupted deletion does not leave a checkpoint's name."""
    target = removed_path(folder)
    if target.exists():
        shutil.rmtree(target)
    folder.rename(target)
    shutil.rmtree(target)


def remove_leftovers(run_dir: Path) -> None:
    """Delete the remains of interrupted saves and deletions."""
    for pattern in (".step_*.partial", ".step_*.removed"):
        for folder in (run_dir / CHECKPOINTS).glob(pattern):
            if folder.is_symlink() or not folder.is_dir():
                folder.unlink()  # only the link: its target may not belong to this run
            else:
                shutil.rmtree(folder)
