"""Checks of output paths, so that a command does not overwrite files of a run or of the user.

A command may write to a path that does not exist, or replace an earlier output of the same command, which is recognized
by its content. Inside a run directory the names of the run's own files and folders are reserved, even if they do not
exist yet.
"""

import os
from collections.abc import Callable
from pathlib import Path

from foundry.run_dir import names
from foundry.run_dir.files import open_regular
from foundry.run_dir.marker import MARK, is_foundry_folder, is_object_with

Recognizer = Callable[[Path], bool]
"""Callable that returns whether a file is an earlier output of the same kind."""

PICTURE_METADATA = {"Software": "foundry"}
"""Text chunks in each PNG file that foundry draws, which identify it as foundry's."""

_RESERVED = {value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)} | {MARK}
_HEAD_BYTES = 4096


def refusal(path: Path, *, own_output: str | None = None, is_earlier: Recognizer | None = None) -> str | None:
    """Return why an output may not be written to a path, with the remedy; None if the output may be written.

    Args:
        path: file or folder to write.
        own_output: reserved name in a run directory that this command may write, since it is that of its output.
        is_earlier: recognizes a file that may be replaced; None if no file may be replaced.
    """
    if (run_dir := _reserving_folder(path, own_output)) is not None:
        return f"is {path}, which is reserved for the files of {run_dir}; choose another path"
    resolved = _resolve(path)
    if not os.path.lexists(resolved):
        return None
    if is_earlier is not None and is_earlier(resolved):
        return None
    kind = "exists" if is_earlier is None else "exists and is not an earlier output of this command"
    return f"is {path}, which {kind}; choose another path, or move it away"


def folder_refusal(folder: Path) -> str | None:
    """Return why an output folder may not be written, with the remedy; None if the folder may be written.

    Args:
        folder: the folder to create, or to fill if it is empty.
    """
    if (run_dir := _reserving_folder(folder, None)) is not None:
        return f"is {folder}, which is reserved for the files of {run_dir}; choose another"
    resolved = _resolve(folder)
    if os.path.lexists(resolved) and (not resolved.is_dir() or any(resolved.iterdir())):
        return f"is {folder}, which exists and is not an empty folder; choose another"
    return None


def has_keys(*keys: str) -> Recognizer:
    """Return a recognizer of JSON files that contain an object with these keys."""
    return lambda path: is_object_with(path, keys)


def has_columns(*columns: str) -> Recognizer:
    """Return a recognizer of CSV files with these columns, whose names must not need quotes."""
    return lambda path: set(columns) <= set(_head(path).partition(b"\n")[0].decode(errors="replace").split(","))


def is_picture(path: Path) -> bool:
    """Return whether a file is a PNG drawn by foundry."""
    head = _head(path)
    chunks = (b"tEXt" + f"{key}\0{text}".encode() for key, text in PICTURE_METADATA.items())
    return head.startswith(b"\x89PNG") and all(chunk in head for chunk in chunks)


def _head(path: Path) -> bytes:
    """Return the first bytes of a regular file; empty if it cannot be read."""
    try:
        with open_regular(path, "rb") as file:
            content: bytes = file.read(_HEAD_BYTES)
    except (OSError, ValueError):
        return b""
    return content


def _resolve(path: Path) -> Path:
    """Return the path with its parent folder resolved, even if `..` follows a folder that does not exist yet."""
    return path.parent.resolve() / path.name


def _reserving_folder(path: Path, own_output: str | None) -> Path | None:
    """Return the run, plan or sweep directory that reserves a path for its own files; None if no directory does."""
    resolved = _resolve(path)
    for folder in resolved.parents:
        first, *rest = resolved.relative_to(folder).parts
        is_own = first == names.PLOTS if rest else first == own_output
        if first in _RESERVED and not is_own and is_foundry_folder(folder):
            return folder
    return None
