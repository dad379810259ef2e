"""Names and lookup of the checkpoints of a run.

checkpoints/step_00000200/manifest.json    sizes, checksums; the folder gets its name after all its files are on disk
checkpoints/latest, checkpoints/best        symlinks to such folders
"""

import re
from pathlib import Path

from foundry.run_dir.names import CHECKPOINTS

MANIFEST, LATEST, BEST = "manifest.json", "latest", "best"
NAME = re.compile(r"step_([0-9]{8,18})")
"""Pattern of a checkpoint folder's name."""


def step_name(step: int) -> str:
    """Return the folder name of the checkpoint at a step."""
    return f"step_{step:08d}"


def removed_path(folder: Path) -> Path:
    """Return the temporary name of a checkpoint folder during its deletion."""
    return folder.with_name(f".{folder.name}.removed")


def parse_step(folder: Path) -> int:
    """Return the step of a checkpoint, parsed from its folder name."""
    match = NAME.fullmatch(folder.name)
    assert match is not None, folder
    return int(match[1])


def linked_step(run_dir: Path, name: str) -> int | None:
    """Return the step of the checkpoint that a symlink in `checkpoints/` points to; None if either does not exist."""
    path = run_dir / CHECKPOINTS / name
    try:
        target = str(path.readlink())
    except OSError:
        return None
    folder = path.with_name(target) if NAME.fullmatch(target) else None
    return parse_step(folder) if folder is not None and folder.is_dir() else None


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoint folders of a run, highest step first, including damaged checkpoints.

    Raises:
        OSError: `checkpoints/` exists but cannot be listed, which must not be mistaken for a run without checkpoints.
    """
    folders = [run_dir / CHECKPOINTS / name for name in names_in(run_dir / CHECKPOINTS) if NAME.fullmatch(name)]
    return sorted(folders, key=parse_step, reverse=True)


def names_in(folder: Path) -> list[str]:
    """Return the names of a folder's entries; an empty list if the folder does not exist."""
    try:
        return [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []


def run_of(weights: Path) -> Path:
    """Return the folder with the files that accompany model weights (tokenizer, settings).

    That is the run directory of a checkpoint, the parent folder of a weights file, and any other folder itself.
    """
    place = weights.resolve()
    return place.parent.parent if place.parent.name == CHECKPOINTS else place if place.is_dir() else place.parent


def find(run_dir: Path, which: str = "last") -> Path:
    """Return the folder of one of a run's complete checkpoints.

    Args:
        run_dir: the run directory.
        which: "last", "best", or a step number.

    Raises:
        FileNotFoundError: the run does not have this checkpoint; the message lists the existing ones.
    """
    # Read the link before listing: a training run publishes a checkpoint, moves the link, then deletes older ones.
    step = linked_step(run_dir, BEST if which == "best" else LATEST)
    folders = [folder for folder in list_checkpoints(run_dir) if MANIFEST in names_in(folder)]
    if which in ("last", "best"):
        # A run killed between publishing its first checkpoint and creating the link has a checkpoint without a link.
        matches = folders[:1] if which == "last" and step is None else [f for f in folders if parse_step(f) == step]
    else:
        matches = [folder for folder in folders if which.isdecimal() and parse_step(folder) == int(which)]
    if not matches:
        names = ", ".join(folder.name for folder in reversed(folders)) or "none"
        raise FileNotFoundError(f"{run_dir} has no checkpoint {which!r}; available: {names}")
    return matches[0].resolve()
