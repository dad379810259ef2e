"""`status.json` of a job, by those who start jobs: before the run takes it over, and after it died without a word."""

import json
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foundry.config.errors import ConfigError
from foundry.config.frozen import hash_config, save_config
from foundry.config.root import Config
from foundry.tracking.run_lock import is_held
from foundry.tracking.strict_json import write_atomically

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


def queue(run_dir: Path, config: Config) -> None:
    """Make a job's run directory, with the configuration that will run.

    One that has begun keeps what it has done, and where another process is at it nothing is changed.
    """
    if is_held(run_dir):
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    if not (run_dir / FILE_NAME).exists():
        save_config(config, run_dir)
    write_status(run_dir, state="queued", reason="", config_hash=hash_config(config))


def fail(run_dir: Path, error: BaseException) -> None:
    """Record that the job ended with an error; what the run itself has said of it stays."""
    if read_status(run_dir).get("state") != "failed":
        run_dir.mkdir(parents=True, exist_ok=True)
        write_status(run_dir, state="failed", reason=last_line(error))


def last_line(error: BaseException) -> str:
    """The end of an error's traceback: its kind and what it says; of a user's mistakes all of them."""
    if isinstance(error, ConfigError):
        return "; ".join(map(str, error.violations))
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
