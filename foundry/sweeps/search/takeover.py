"""Takeover of a run directory from a command that is gone: the run continues in a copy."""

import os
import shutil
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from foundry.launch.ledger import say
from foundry.run_dir.lock import LOCK, is_held, lock
from foundry.run_dir.marker import is_foundry_folder
from foundry.run_dir.names import CHECKPOINTS, MLFLOW_PARENT, SUBMISSION, TRIAL
from foundry.run_dir.redact import one_line
from foundry.run_dir.status import read_status

_NOT_COPIED = frozenset({LOCK, TRIAL, SUBMISSION, MLFLOW_PARENT})
"""Files that belong to the command that is gone."""


def continue_from(former: Path, run_dir: Path, config_hash: str) -> bool:
    """Copy a run directory of another sweep, so that the run continues there; return whether it was copied.

    The former directory keeps all its files, because it belongs to the user. The files of checkpoints, which never
    change, are hard links if both directories are on the same file system.

    Nothing is copied if this machine cannot reach, lock or copy the directory, if a process on any machine may still
    train there, or if it contains a run with another configuration.

    Args:
        former: the run directory of the trial, in the sweep directory of the other command.
        run_dir: the run directory of this command; nothing is copied if it exists.
        config_hash: hash of the trial's configuration.
    """
    if run_dir.exists() or not _is_free(former, config_hash):
        return False
    part = run_dir.with_name(f".{run_dir.name}.copy")
    shutil.rmtree(part, ignore_errors=True)  # of a command that was killed while it copied
    try:
        with ExitStack() as stack:
            if not lock(former, stack):
                return False
            shutil.copytree(former, part, ignore=_ignored, copy_function=partial(_copy, former / CHECKPOINTS))
            part.rename(run_dir)
    except OSError as error:  # such as the directory of another user, who may read it but not lock it
        shutil.rmtree(part, ignore_errors=True)
        reason = one_line(error.strerror or "some files cannot be copied")
        say(f"{former} cannot be continued from ({reason}); its run starts anew", sys.stderr)
        return False
    return True


def _is_free(former: Path, config_hash: str) -> bool:
    try:
        if (
            not former.is_dir()
            or not is_foundry_folder(former)
            or read_status(former).get("config_hash") != config_hash
        ):
            return False
        # A lock of another machine may not be visible here; without a lock file, no process has trained.
        return is_held(former) is False or not (former / LOCK).exists()
    except OSError:
        return False


def _ignored(folder: str, names: list[str]) -> set[str]:
    """Return the entries that are not copied, which include everything except for regular files and folders."""
    paths = {name: Path(folder, name) for name in names}
    special = {name for name, path in paths.items() if path.is_symlink() or not (path.is_file() or path.is_dir())}
    return special | _NOT_COPIED.intersection(names)


def _copy(checkpoints: Path, source: str, target: str) -> None:
    """Copy a file, or link it if it is in the folder of checkpoints."""
    if checkpoints in Path(source).parents:
        try:
            os.link(source, target)
        except OSError:  # another file system
            pass
        else:
            return
    shutil.copy2(source, target)
