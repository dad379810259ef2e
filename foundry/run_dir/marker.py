"""The marker file of directories that foundry may write to: runs, plans and sweeps."""

import json
from collections.abc import Iterable
from pathlib import Path

from foundry.run_dir.files import read_text, write_atomically
from foundry.run_dir.names import STATUS, SWEEP

MARK = ".foundry"
"""Marker file in every run, plan and sweep directory, written before any other file."""

_TEXT = "This directory is foundry's: files that foundry writes here may be replaced by it.\n"
_RECORDS = {STATUS: {"state", "reason", "step", "config_hash"}, SWEEP: {"jobs", "launcher", "metric"}}


def mark(folder: Path) -> None:
    """Mark a directory as foundry's if it is not marked yet."""
    if not _is_marked(folder):
        write_atomically(folder / MARK, _TEXT)


def is_foundry_folder(folder: Path) -> bool:
    """Return whether a directory is a run, plan or sweep directory: it has the marker, or a status or sweep file.

    The content of these files is checked, because a user's folder may contain its own status.json. Other files of a
    run, such as config.yaml and tokenizer.json, do not count.
    """
    return _is_marked(folder) or any(is_object_with(folder / name, keys) for name, keys in _RECORDS.items())


def _is_marked(folder: Path) -> bool:
    try:
        return read_text(folder / MARK) == _TEXT
    except (OSError, ValueError):  # no marker, or a user's file with the same name
        return False


def is_object_with(path: Path, keys: Iterable[str]) -> bool:
    """Return whether a file contains a JSON object with at least these keys."""
    try:
        content = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.keys() >= set(keys)
