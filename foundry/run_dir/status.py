"""`status.json` of a run directory: what the run is doing, written by those who start it and by the run itself."""

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
"""States of a job that is still to be started."""

FAILED = ("failed", "lost")
"""States of a job that came to an end without a result; a lost one without recording why."""

ENDED = ("finished", "stopped", *FAILED)
"""States of a job that will not change by themselves."""

STATES = ("finished", "running", *WAITING, "stopped", *FAILED)
"""All states, in the order in which a report shows them."""

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
    """What the file says; empty where there is none.

    Raises:
        DamagedFileError: it is not what foundry writes, such as one that a power cut has left empty.
    """
    try:
        return read_object(run_dir / STATUS, needed={"state": str}, optional=_TYPES)
    except FileNotFoundError:
        return {}


def read_status(run_dir: Path) -> dict[str, Any]:
    """What the file says; empty where there is none, or a damaged one.

    The latter is a warning, once: what the run has done is known from its checkpoints.
    """
    try:
        return load_status(run_dir)
    except DamagedFileError as error:
        if run_dir not in _warned:
            _warned.add(run_dir)
            _log.warning("%s; the state of the run is taken from its checkpoints", one_line(str(error)))
        return {}


def write_status(run_dir: Path, **changes: Any) -> None:
    """Change what the file says; the rest of it stays. An end is on the disk when this returns.

    Nothing is written for a run whose directory is gone.
    """
    if not run_dir.is_dir():
        return
    is_end = changes.get("state", "queued") != "queued"
    replace_status(run_dir, {**_FRESH, **read_status(run_dir), **changes}, durable=is_end)


def replace_status(run_dir: Path, status: Mapping[str, Any], *, durable: bool) -> None:
    """Write the file, with the time of this change and the version of foundry in it.

    Args:
        run_dir: of the run.
        status: all that it says: state, reason, step, config_hash and started.
        durable: wait until it is on the disk.
    """
    content = {**status, "reason": one_line(str(status["reason"])), "updated": now(), "version": __version__}
    write_atomically(run_dir / STATUS, json.dumps(json.loads(encode(content)), indent=2) + "\n", durable=durable)


def now() -> str:
    """The time as the file has it: ISO 8601 in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
