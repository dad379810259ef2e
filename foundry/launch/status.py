"""`status.json` of a job, by those who start jobs: before the run takes it over, and after it died without a word."""

import traceback
from pathlib import Path

from foundry.config.errors import ConfigError
from foundry.config.frozen import hash_config, save_config
from foundry.config.root import Config
from foundry.records.lock import is_held
from foundry.records.status import FILE_NAME, read_status, write_status


def queue(run_dir: Path, config: Config) -> None:
    """Make a job's run directory, with the configuration that will run.

    One that has begun keeps what it has done, and where another process is at it nothing is changed.
    """
    if is_held(run_dir):
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    is_new = not (run_dir / FILE_NAME).exists()
    # First, as it says whose directory this is.
    write_status(run_dir, state="queued", reason="", config_hash=hash_config(config))
    if is_new:
        save_config(config, run_dir)


def fail(run_dir: Path, error: BaseException) -> None:
    """Record that the job ended with an error; what the run itself has said of it stays."""
    if read_status(run_dir).get("state") != "failed":
        run_dir.mkdir(parents=True, exist_ok=True)
        write_status(run_dir, state="failed", reason=last_line(error))


def last_line(error: BaseException) -> str:
    """The end of an error's traceback: its kind and what it says; of a user's mistakes all of them."""
    if isinstance(error, ConfigError):
        return "; ".join(map(str, error.violations))
    said = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    return said.removeprefix(f"{type(error).__module__}.")
