"""Rules for the files that a command writes: a file that exists is never replaced, unless the same command wrote it."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from foundry.config.errors import ConfigError, Violation
from foundry.run_dir import names
from foundry.run_dir.files import read_text

_FREE = {names.EVALUATION, names.TASKS, names.PLOTS, names.ROLLOUTS}
_OF_A_RUN = {
    value for name, value in vars(names).items() if name.isupper() and isinstance(value, str) and value not in _FREE
}
"""Names in a run directory that no output may take."""


def check_writable(key: str, folder: Path) -> None:
    """Refuse a folder that cannot be created, or cannot be written into, before any work is done.

    Args:
        key: the option that names the folder.
        folder: need not exist.

    Raises:
        ConfigError: with the reason.
    """
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path) or path == path.parent)
    if not there.is_dir():
        kind = "a broken symbolic link" if there.is_symlink() else "no folder"
        raise ConfigError(Violation(key, f"is {folder} but {there} is {kind}; choose another"))
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(Violation(key, f"is {folder} but {there} cannot be written into; choose another"))


def check_new_folder(key: str, folder: Path) -> None:
    """Refuse a folder for the files of a command unless it is new or empty.

    Raises:
        ConfigError: it holds files, is no folder, belongs to a run, or cannot be written.
    """
    check_writable(key, folder)
    if os.path.lexists(folder) and any(folder.iterdir()):
        raise ConfigError(Violation(key, f"is {folder}, which exists and is not an empty folder; choose another"))
    _check_no_part_of_a_run(key, folder)


def check_new_file(key: str, file: Path) -> None:
    """Refuse a file that exists, or whose name belongs to a run.

    Raises:
        ConfigError: with the reason.
    """
    check_writable(key, file.parent)
    if os.path.lexists(file):
        raise ConfigError(Violation(key, f"is {file}, which exists; choose another"))
    _check_no_part_of_a_run(key, file)


def check_new_stem(key: str, stem: Path) -> None:
    """Refuse a file name without suffix if a file of that name exists with any suffix.

    Raises:
        ConfigError: with the reason.
    """
    check_writable(key, stem.parent)
    with suppress(OSError):  # a folder that may be entered, and not listed
        for path in sorted(stem.parent.iterdir()) if stem.parent.is_dir() else ():
            if path.name.startswith(f"{stem.name}.") and not path.is_dir():
                raise ConfigError(Violation(key, f"is {stem} but {path} exists; choose another"))
    _check_no_part_of_a_run(key, stem)


def check_own_files(key: str, folder: Path, main: str, keys: Sequence[str], *others: str) -> None:
    """Refuse a folder whose files of fixed names exist and were not written by the command that is to replace them.

    Args:
        key: the option that names the folder.
        folder: need not exist.
        main: name of the JSON file by which the command recognises its own files.
        keys: some that this file has.
        others: names of the files that the command writes with it.

    Raises:
        ConfigError: `main` is another file, or does not exist while another one does.
    """
    check_writable(key, folder)
    if os.path.lexists(folder / main):
        found = None if _is_own(folder / main, keys) else main
    else:
        found = next((name for name in others if os.path.lexists(folder / name)), None)
    if found is not None:
        message = f"is {folder}, where {found} is a file that this command has not written; move that file"
        raise ConfigError(Violation(key, message))


def _is_own(file: Path, keys: Sequence[str]) -> bool:
    try:
        content = json.loads(read_text(file))
    except (OSError, ValueError, RecursionError):  # no regular file, no UTF-8, no JSON
        return False
    return isinstance(content, dict) and content.keys() >= set(keys)


def _check_no_part_of_a_run(key: str, path: Path) -> None:
    absolute = Path(os.path.realpath(path))
    for folder in absolute.parents:
        inside = absolute.relative_to(folder).parts[0]
        if inside in _OF_A_RUN and (folder / names.CONFIG).is_file() and _is_run(folder):
            message = f"is {path}, and {inside} belongs to the run in {folder}; choose another"
            raise ConfigError(Violation(key, message))


def _is_run(folder: Path) -> bool:
    return any(os.path.lexists(folder / name) for name in (names.STATUS, names.CHECKPOINTS))
