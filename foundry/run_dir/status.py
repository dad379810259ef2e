"""`status.json` of a run directory, for those who start or watch runs."""

import json
import logging
from datetime import UTC, datetime
from pathlib import Path
from types import NoneType
from typing import Any

from foundry.run_dir.files import write_atomically
from foundry.run_dir.redact import one_line
from foundry.run_dir.strict_json import DamagedFileError, Types, read_object

FILE_NAME = "status.json"

_TEXT_OR_NONE = (str, NoneType)
TYPES: dict[str, Types] = {
    "reason": str,
    "step": int,
    "config_hash": _TEXT_OR_NONE,
    "started": _TEXT_OR_NONE,
    "updated": str,
}
"""Of what it says besides `state`, which is a text."""

_log = logging.getLogger(__name__)
_said = set[Path]()


def read_status(run_dir: Path) -> dict[str, Any]:
    """What the job's `status.json` says; empty where there is none, or one that a power cut has left unreadable.

    The latter is a warning, once: what the run has done is known from its checkpoints.
    """
    path = run_dir / FILE_NAME
    try:
        return read_object(path, needed={"state": str}, optional=TYPES)
    except FileNotFoundError:
        return {}
    except DamagedFileError as error:
        if path not in _said:
            _said.add(path)
            _log.warning("%s; the state of the run is taken from its checkpoints", one_line(str(error)))
        return {}


def write_status(run_dir: Path, **changes: Any) -> None:
    """Change what `status.json` says; the rest of it stays. An end is on the disk when this returns."""
    fresh = {"state": "queued", "reason": "", "step": 0, "config_hash": None, "started": None}
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    status = {**fresh, **read_status(run_dir), **changes, "updated": now}
    status["reason"] = one_line(str(status["reason"]))
    is_end = changes.get("state", "queued") != "queued"
    write_atomically(run_dir / FILE_NAME, json.dumps(status, indent=2) + "\n", durable=is_end)
