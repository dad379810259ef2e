"""A copy of the code, so that jobs that wait in a queue run what was there when they were submitted."""

import os
import shutil
import subprocess
from pathlib import Path

from foundry.config.compose import config_dir
from foundry.run_dir.files import make_folder

FOLDER = "code"


def snapshot(sweep_dir: Path) -> Path:
    """Copy foundry's source and options, and the git-tracked Python files below the working directory.

    Args:
        sweep_dir: gets a folder `code`; one that is there already is the sweep's, and stays as it is.

    Returns:
        The folder, to be imported from.

    Raises:
        UnsafeFileError: there is a symbolic link in its place.
    """
    folder = sweep_dir / FOLDER
    if os.path.lexists(folder):
        return make_folder(folder, parents=True)
    partial = sweep_dir / f".{FOLDER}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    make_folder(partial, parents=True)
    package = Path(__file__).resolve().parent.parent
    for name in _tracked():
        if Path(name).parts[0] != package.name:
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(name, partial / name)
    without_caches = shutil.ignore_patterns("__pycache__", "conf")
    shutil.copytree(package, partial / package.name, ignore=without_caches, dirs_exist_ok=True)
    shutil.copytree(config_dir(), partial / package.name / "conf", ignore=without_caches)
    partial.rename(folder)
    return folder


def _tracked() -> list[str]:
    """The Python files below the working directory that git tracks and that are there; none where git knows nothing."""
    try:
        message = subprocess.run(["git", "ls-files", "-z", "--", "*.py"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [name for name in message.stdout.split("\0") if name and Path(name).is_file()]
