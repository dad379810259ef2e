"""`status.json` of a run directory, for those who start or watch runs."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foundry.records.files import write_atomically

FILE_NAME = "status.json"


def read_status(run_dir: Path) -> dict[str, Any]:
    """What the job's `status.json` says; empty where there is none."""
    try:
        status = json.loads((run_dir / FILE_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    assert isinstance(status, dict)
    return status


def write_status(run_dir: Path, **changes: Any) -> None:
    """Change what `status.json` says; the rest of it stays."""
    fresh = {"state": "queued", "reason": "", "step": 0, "config_hash": None, "started": None}
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    status = {**fresh, **read_status(run_dir), **changes, "updated": now}
    write_atomically(run_dir / FILE_NAME, json.dumps(status, indent=2) + "\n")
