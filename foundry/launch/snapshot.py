"""Snapshot of the code, so that queued jobs run the code as it was when they were submitted."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from foundry.config.composition.compose import config_dir
from foundry.run_dir.files import make_folder

FOLDER = "code"


def snapshot(sweep_dir: Path) -> Path:
    """Copy foundry's source and configuration files, and the Python files that git tracks in folders of `sys.path`.

    Only `sys.path` folders inside the working directory are copied.

    Args:
        sweep_dir: parent of the copy, a folder named `code`; an existing copy is kept unchanged.

    Returns:
        The folder of the copy, to import from.

    Raises:
        UnsafeFileError: the folder is a symlink.
    """
    folder = sweep_dir / FOLDER
    if os.path.lexists(folder):
        return make_folder(folder, parents=True)
    partial = sweep_dir / f".{FOLDER}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    make_folder(partial, parents=True)
    package = Path(__file__).resolve().parent.parent
    for name in _tracked_files():
        if Path(name).parts[0] != package.name:
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(name, partial / name)
    without_caches = shutil.ignore_patterns("__pycache__", "conf")
    shutil.copytree(package, partial / package.name, ignore=without_caches, dirs_exist_ok=True)
    shutil.copytree(config_dir(), partial / package.name / "conf", ignore=without_caches)
    partial.rename(folder)
    return folder


def copied_folders(code: Path) -> list[Path]:
    """Return the folders of a copy that correspond to `sys.path` entries below the working directory."""
    folders = [code / folder for folder in _import_folders() if folder != Path()]
    return [folder for folder in folders if folder.is_dir()]


def _import_folders() -> list[Path]:
    """Return the entries of `sys.path` in the working directory, relative to it."""
    here = Path.cwd()
    entries = [Path(entry).resolve() for entry in sys.path if entry]
    return [entry.relative_to(here) for entry in entries if entry.is_relative_to(here) and entry.is_dir()]


def _tracked_files() -> list[str]:
    """Return the existing Python files in `_import_folders` that git tracks; empty outside of a git repository."""
    try:
        message = subprocess.run(["git", "ls-files", "-z", "--", "*.py"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    folders = _import_folders()
    names = [name for name in message.stdout.split("\0") if name and Path(name).is_file()]
    return [name for name in names if any(Path(name).is_relative_to(folder) for folder in folders)]
