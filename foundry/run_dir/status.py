"""`status.json` of a run directory: the state of a run, written by its launcher and by the run itself."""

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import NoneType
from typing import Any

from foundry import __version__
from foundry.run_dir.files import write_atomically
from foundry.run_dir.names import STATUS
from foundry.run_dir.redact import one_line
from foundry.run_dir.strict_json import DamagedFileError, Types, encode, read_object

WAITING = ("requeued", "queued")
"""States of a job that waits to be started, or to be restarted by its scheduler."""

FAILED = ("failed", "lost")
"""States of a job that ended without a result; a lost job did not record a reason."""

ENDED = ("finished", "paused", "stopped", *FAILED)
"""States of a job that do not change until it is started again; a search may continue a paused job."""

STATES = ("finished", "running", "paused", *WAITING, "stopped", *FAILED)
"""All states, in the order of a report."""

_TEXT_OR_NONE = (str, NoneType)
_TYPES: dict[str, Types] = {
    "reason": str,
    "step": int,
    "config_hash": _TEXT_OR_NONE,
    "started": _TEXT_OR_NONE,
    "updated": str,
    "restarts": list,
    "version": str,
}
_FRESH = {"state": "queued", "reason": "", "step": 0, "config_hash": None, "started": None}
_log = logging.getLogger(__name__)
_warned = set[Path]()


def load_status(run_dir: Path) -> dict[str, Any]:
    """Return the content of `status.json`; empty if the file does not exist.

    Raises:
        DamagedFileError: the file cannot be read, was not written by foundry, or was left empty by a power failure.
    """
    try:
        return read_object(run_dir / STATUS, required={"state": str}, optional=_TYPES)
    except FileNotFoundError:
        return {}


def read_status(run_dir: Path) -> dict[str, Any]:
    """Return the content of `status.json`; empty if the file does not exist or is damaged.

    A damaged file is logged as a warning once; the progress of the run is then read from its checkpoints.
    """
    try:
        return load_status(run_dir)
    except DamagedFileError as error:
        if run_dir not in _warned:
            _warned.add(run_dir)
            _log.warning("%s; the state of the run is derived from its checkpoints", one_line(str(error)))
        return {}


def write_status(run_dir: Path, **changes: Any) -> None:
    """Change some fields of `status.json`; a state other than "queued" is on disk when the function returns.

    Writes nothing if the run directory no longer exists.
    """
    if not run_dir.is_dir():
        return
    is_end = changes.get("state", "queued") != "queued"
    replace_status(run_dir, {**_FRESH, **read_status(run_dir), **changes}, durable=is_end)


def replace_status(run_dir: Path, status: Mapping[str, Any], *, durable: bool) -> None:
    """Write `status.json`, and add the current time and foundry's version.

    Args:
        run_dir: the run directory.
        status: all other fields: state, reason, step, config_hash and started.
        durable: wait until the file is on disk.
    """
    content = {**status, "reason": one_line(str(status["reason"])), "updated": now(), "version": __version__}
    write_atomically(run_dir / STATUS, json.dumps(json.loads(encode(content)), indent=2) + "\n", durable=durable)


def now() -> str:
    """Return the current time as written to `status.json`: ISO 8601 in UTC, with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
