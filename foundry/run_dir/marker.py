"""Which directories are foundry's, and so may be written into: those of runs, plans and sweeps."""

import json
from pathlib import Path

from foundry.run_dir.files import read_text, write_atomically
from foundry.run_dir.names import STATUS, SWEEP

MARK = ".foundry"
"""A file in every run, plan and sweep directory, written before anything else."""

_TEXT = "This directory is foundry's: files that foundry writes here may be replaced by it.\n"
_RECORDS = {STATUS: {"state", "reason", "step", "config_hash"}, SWEEP: {"jobs", "launcher", "metric"}}


def mark(folder: Path) -> None:
    """Write down that a directory is foundry's, where that is not written there yet."""
    if not _is_marked(folder):
        write_atomically(folder / MARK, _TEXT)


def is_ours(folder: Path) -> bool:
    """Whether a directory is a run's, a plan's or a sweep's: it is marked, or holds the records of one without a mark.

    The names of files alone say nothing: a user's folder may have a config.yaml and a tokenizer.json too.
    """
    return _is_marked(folder) or any(_holds(folder / name, keys) for name, keys in _RECORDS.items())


def _is_marked(folder: Path) -> bool:
    try:
        return read_text(folder / MARK) == _TEXT
    except (OSError, ValueError):  # no mark, or a user's own file of that name
        return False


def _holds(path: Path, keys: set[str]) -> bool:
    """Whether a file is a JSON object with these keys."""
    try:
        content = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and keys <= content.keys()
