"""Where a run's checkpoints lie, and which of them is meant.

checkpoints/step_00000200/manifest.json          what it is; the folder has its name once all of it is on the disk
checkpoints/latest, checkpoints/best              links
"""

import re
from pathlib import Path

from foundry.run_dir.names import CHECKPOINTS

MANIFEST, LATEST, BEST = "manifest.json", "latest", "best"
NAME = re.compile(r"step_([0-9]{8,18})")
"""What a checkpoint's folder is called."""


def step_name(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"step_{step:08d}"


def parse_step(folder: Path) -> int:
    """The step of a checkpoint, by its name."""
    match = NAME.fullmatch(folder.name)
    assert match is not None, folder
    return int(match[1])


def linked_step(run_dir: Path, name: str) -> int | None:
    """The step that a link points to; None where there is none, or it leads elsewhere."""
    path = run_dir / CHECKPOINTS / name
    try:
        target = str(path.readlink())
    except OSError:
        return None
    folder = path.with_name(target) if NAME.fullmatch(target) else None
    return parse_step(folder) if folder is not None and folder.is_dir() else None


def list_checkpoints(run_dir: Path) -> list[Path]:
    """The published checkpoints, newest first, whole or not.

    Raises:
        OSError: the folder is there but cannot be listed: that is not a run without checkpoints.
    """
    folders = [run_dir / CHECKPOINTS / name for name in names_in(run_dir / CHECKPOINTS) if NAME.fullmatch(name)]
    return sorted(folders, key=parse_step, reverse=True)


def names_in(folder: Path) -> list[str]:
    """What a folder holds; nothing where there is none."""
    try:
        return [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []


def run_of(weights: Path) -> Path:
    """The folder that has what lies beside weights: of a checkpoint its run, of a file its folder, or itself."""
    place = weights.resolve()
    return place.parent.parent if place.parent.name == CHECKPOINTS else place if place.is_dir() else place.parent


def find(run_dir: Path, which: str = "last") -> Path:
    """The folder of a run's checkpoint.

    Args:
        run_dir: the run directory.
        which: "last", "best", or the number of a step.

    Raises:
        FileNotFoundError: there is none; the message lists those there are.
    """
    # Before the list: a run that trains publishes a checkpoint, then moves the link, then deletes the older ones.
    step = linked_step(run_dir, BEST if which == "best" else LATEST)
    there = [folder for folder in list_checkpoints(run_dir) if MANIFEST in names_in(folder)]
    if which in ("last", "best"):
        # Killed between publishing its first checkpoint and pointing to it, a run has one that no link names.
        found = there[:1] if which == "last" and step is None else [f for f in there if parse_step(f) == step]
    else:
        found = [folder for folder in there if which.isdecimal() and parse_step(folder) == int(which)]
    if not found:
        names = ", ".join(folder.name for folder in reversed(there)) or "none"
        raise FileNotFoundError(f"{run_dir} has no checkpoint {which!r}; there are: {names}")
    return found[0].resolve()
