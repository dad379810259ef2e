"""`status.json` of a job, by those who start jobs: before the run takes it over, and after it died without a word."""

from pathlib import Path

from foundry.config.errors import ConfigError
from foundry.config.frozen import hash_config, save_config
from foundry.config.schemas.root import Config
from foundry.run_dir.lock import is_held
from foundry.run_dir.status import FILE_NAME, read_status, write_status


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
        write_status(run_dir, state="failed", reason=format_reason(error))


def format_reason(error: BaseException) -> str:
    """An error in one line: its kind and the first line of what it says; of a user's mistake all of them."""
    if isinstance(error, ConfigError):
        return "; ".join(map(str, error.violations))
    said = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
