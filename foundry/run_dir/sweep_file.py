"""`sweep.json`: the jobs of a sweep, written before these jobs start, and read to resume or report the sweep."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foundry.run_dir.files import inside, write_atomically
from foundry.run_dir.names import SWEEP
from foundry.run_dir.strict_json import DamagedFileError, Types, check_types, read_object

_FACTS: dict[str, Types] = {"command": list, "created": str, "launcher": str, "metric": str, "direction": str}
_JOB: dict[str, Types] = {"index": int, "dir": str, "overrides": list}
_JOB_TO_RESUME: dict[str, Types] = {"config_hash": str, "id": str}

_LEVELS = 3
"""Maximum number of folders between a job and its sweep directory, plus one."""


def read_sweep_file(sweep_dir: Path, *, to_resume: bool = False) -> dict[str, Any]:
    """Return the content of `sweep.json`; its `jobs` are objects, each with a `dir` inside the sweep directory.

    Args:
        sweep_dir: the sweep directory.
        to_resume: require all fields that resuming needs; a report needs only the jobs.

    Raises:
        FileNotFoundError: the file does not exist.
        DamagedFileError: the file was not written by foundry, or names a directory outside of the sweep directory.
    """
    path = sweep_dir / SWEEP
    required = {"jobs": list, **(_FACTS if to_resume else {})}
    content = read_object(path, required=required, optional=_FACTS)
    for job in content["jobs"]:
        if not isinstance(job, dict):
            raise DamagedFileError(path, "has a job that is not a JSON object")
        check_types(path, job, required=_JOB | (_JOB_TO_RESUME if to_resume else {}))
        try:
            inside(sweep_dir, job["dir"])
        except ValueError as error:
            raise DamagedFileError(path, f"has a job whose directory {error}") from None
    return content


def find_job(run_dir: Path) -> str | None:
    """Return the directory of a job relative to its sweep, such as `3`; None if the run is not a job of a sweep."""
    for folder in list(run_dir.absolute().parents)[:_LEVELS]:
        if not (folder / SWEEP).is_file():
            continue
        try:
            jobs = read_sweep_file(folder)["jobs"]
        except (OSError, DamagedFileError):
            return None
        names = [str(job["dir"]) for job in jobs]
        return next((name for name in names if (folder / name).resolve() == run_dir.resolve()), None)
    return None


def write_sweep_file(sweep_dir: Path, content: Mapping[str, Any]) -> None:
    """Replace `sweep.json` atomically, and return after it is on disk."""
    sweep_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(sweep_dir / SWEEP, json.dumps(content, indent=2) + "\n", durable=True)
