"""`sweep.json`: the jobs of a sweep, written before the first one starts, read when it is resumed or reported."""

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


def read_sweep_file(sweep_dir: Path, *, to_resume: bool = False) -> dict[str, Any]:
    """The content of a sweep's file; `jobs` is a list of objects whose `dir` lies in the directory.

    Args:
        sweep_dir: the sweep's directory.
        to_resume: whether everything that resuming the sweep needs must be there; a report makes do with the jobs.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedFileError: it is not what foundry writes, or names a directory outside of the sweep's.
    """
    path = sweep_dir / SWEEP
    needed = {"jobs": list, **(_FACTS if to_resume else {})}
    content = read_object(path, needed=needed, optional=_FACTS)
    for job in content["jobs"]:
        if not isinstance(job, dict):
            raise DamagedFileError(path, "has a job that is no JSON object")
        check_types(path, job, needed=_JOB | (_JOB_TO_RESUME if to_resume else {}))
        try:
            inside(sweep_dir, job["dir"])
        except ValueError as error:
            raise DamagedFileError(path, f"has a job whose directory {error}") from None
    return content


def write_sweep_file(sweep_dir: Path, content: Mapping[str, Any]) -> None:
    """Replace the file; a reader sees the old one or the new one."""
    sweep_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(sweep_dir / SWEEP, json.dumps(content, indent=2) + "\n", durable=True)
