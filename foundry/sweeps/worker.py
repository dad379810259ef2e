"""`python -m foundry.sweeps.worker RUN_DIR trust=true`: run a job exactly as recorded in its run directory.

The worker instantiates the parts and configures the logging that the directory names, which can execute arbitrary code.
A launcher calls `work` on a directory that it has just written; on the command line, `trust=true` confirms the trust.

The exit code is the run's; `foundry/core/exit_codes.py` has the table.
"""

if __name__ == "__main__":
    from foundry.core.safe_path import leave_current_folder

    leave_current_folder()  # before the imports below

import json
import logging
import logging.config
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from foundry.config.composition.resolvers import register_resolvers
from foundry.config.environment import detect
from foundry.config.record.frozen import load_config
from foundry.config.record.strict_yaml import read_yaml
from foundry.config.schemas.root import Config
from foundry.core.errors import ConfigError, Violation, format_reason
from foundry.core.exit_codes import ExitCode
from foundry.core.stop_signals import Stopped
from foundry.launch.local import WorkerFailed, exit_code_of, format_trace
from foundry.launch.slurm.end import ErrorOutput
from foundry.launch.slurm.queue import will_restart
from foundry.launch.slurm.task import NotRequeued
from foundry.launch.start import start
from foundry.run_dir.attempt import ATTEMPT
from foundry.run_dir.ends import is_consequence
from foundry.run_dir.files import make_folder, open_regular, write_atomically
from foundry.run_dir.lock import RunDirectoryLostError, is_held
from foundry.run_dir.names import HYDRA, LOG, MLFLOW_PARENT
from foundry.run_dir.redact import one_line, printable
from foundry.run_dir.status import write_status
from foundry.run_dir.strict_json import read_object

if TYPE_CHECKING:
    from foundry.engine.train import RunResult

log = logging.getLogger(__name__)

_NOTES = ".failures"
_PATIENCE_SECONDS = 3.0  # wait for another rank's failure note; Slurm's KillWait may be as short as 5 s
_LOCKED_SECONDS = 120.0  # wait for a process of the previous attempt to save and exit


def work(run_dir: Path) -> int:
    """Run the job in a run directory, in this process alone or as one of several ranks.

    A failure is written with its traceback to foundry.log, and as one line to status.json.

    Args:
        run_dir: absolute path of a run directory that a launcher has prepared.

    Returns:
        The exit code.

    Raises:
        SystemExit: if submitit has requeued the job, so this process must exit.
    """
    rank = detect().rank
    error_output = ErrorOutput(run_dir)
    job_logging = _set_up_job(run_dir, rank)
    try:
        if rank == 0:
            _wait_for_last_attempt(run_dir)
        # Trusted: a launcher has just written the directory, or the user wrote trust=true.
        start_job(load_config(run_dir, trust=True), run_dir, job_logging)
    except NotRequeued as ended:
        if rank == 0:
            write_status(run_dir, state="stopped", reason=ended.reason)
        return ended.code
    except Stopped as stopped:
        log.warning("%s", stopped)
        if rank == 0 and stopped.state == "requeued" and will_restart() is False:
            write_status(run_dir, state="stopped", reason=f"{stopped.reason}; Slurm does not queue the job again")
        return stopped.code
    except KeyboardInterrupt:
        if rank == 0:
            write_status(run_dir, state="stopped", reason="SIGINT")
        return ExitCode.SIGINT
    except RunDirectoryLostError as error:
        log.error("%s", error)
        return ExitCode.FAILED
    except Exception as error:
        return _record(error, run_dir, rank, error_output)
    return ExitCode.SUCCESS


def start_job(config: Config, run_dir: Path, job_logging: Mapping[str, Any] | None = None) -> "RunResult":
    """Start a run with `foundry.launch.start`; after the last job of a sweep, end the sweep's run in MLflow.

    If the process of the sweep is still alive, the sweep's run is left to that process.
    """
    try:
        return start(config, run_dir, job_logging)
    finally:
        if detect().rank == 0 and (run_dir / MLFLOW_PARENT).is_file():
            from foundry.sweeps.mlflow_parent import close_parent_of_job

            close_parent_of_job(run_dir, uri=config.tracking.uri)


def _set_up_job(run_dir: Path, rank: int) -> dict[str, Any]:
    """Set the environment and logging that Hydra would set for the job, and return the logging configuration."""
    register_resolvers()
    hydra_config = OmegaConf.create(read_yaml(run_dir / HYDRA / "hydra.yaml"))
    assert isinstance(hydra_config, DictConfig)
    for name, value in hydra_config.hydra.job.env_set.items():
        os.environ[str(name)] = str(value)
    if hydra_config.hydra.job.chdir:
        os.chdir(run_dir)
    job_logging: Any = OmegaConf.to_container(hydra_config.hydra.job_logging, resolve=True)
    if rank == 0:
        logging.config.dictConfig(job_logging)
    return dict(job_logging)


def _wait_for_last_attempt(run_dir: Path) -> None:
    """Wait up to 120 s for a process that still holds the run's lock to save and exit, as after a sweep's restart."""
    deadline = time.monotonic() + _LOCKED_SECONDS
    while is_held(run_dir) and time.monotonic() < deadline:
        time.sleep(0.5)


def _record(error: Exception, run_dir: Path, rank: int, error_output: ErrorOutput) -> int:
    """Record why this rank failed, or on rank 0 why the run failed, and return the exit code."""
    trace = format_trace(error)
    reason = str(error) if isinstance(error, WorkerFailed) else format_reason(error)
    is_secondary = is_consequence(type(error).__name__, reason)
    if rank > 0:
        with suppress(OSError), open_regular(run_dir / LOG, "a") as file:
            file.write(printable(f"rank {rank} failed:\n{trace}"))
        sys.stderr.write(printable(trace))
        if not is_secondary:
            _leave_note(run_dir, rank, reason)
        return exit_code_of(error)
    log.error("failed:\n%s", trace)
    if is_secondary and detect().world_size > 1:
        reason = _cause(run_dir, error_output) or reason
    # When Slurm preempts or requeues a job, ranks exit in any order and report errors about missing peers.
    state = "requeued" if will_restart() else "failed"
    write_status(run_dir, state=state, reason=one_line(reason))
    return exit_code_of(error)


def _note_path(run_dir: Path, rank: int | str) -> Path:
    """Return the path of this attempt's failure note of a rank."""
    job = os.environ.get(ATTEMPT) or os.environ.get("SLURM_JOB_ID") or os.environ.get("SUBMITIT_LOCAL_JOB_ID")
    attempt = f"{job}.{os.environ.get('SLURM_RESTART_COUNT', 0)}"
    return run_dir / _NOTES / f"{attempt}.rank{rank}.json"


def _leave_note(run_dir: Path, rank: int, reason: str) -> None:
    path = _note_path(run_dir, rank)
    make_folder(path.parent, parents=True)
    write_atomically(path, json.dumps({"reason": f"rank {rank}: {reason}"}))


def _cause(run_dir: Path, error_output: ErrorOutput) -> str | None:
    """Return the error of the rank that failed first, from a failure note or else srun's messages; None if unknown."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        end = error_output.first_end()  # read first, since a rank writes its note before it exits
        pattern = _note_path(run_dir, "*")
        for path in pattern.parent.glob(pattern.name):
            return str(read_object(path, required={"reason": str})["reason"])
        if end is not None:
            return end
        time.sleep(0.1)
    return None


def main(arguments: Sequence[str]) -> int:
    """Run the job that the arguments `RUN_DIR trust=true` name; return the exit code."""
    try:
        if list(arguments[1:]) != ["trust=true"]:
            message = "the configuration in RUN_DIR may run code; if you trust its author, write RUN_DIR trust=true"
            raise ConfigError(Violation("trust", message))
        run_dir = Path(arguments[0]).absolute()
        if not (run_dir / HYDRA / "hydra.yaml").is_file():
            message = f"is {run_dir}, which is not the run directory of a job; is its disk mounted on this machine?"
            raise ConfigError(Violation("RUN_DIR", message))
        return work(run_dir)
    except ConfigError as error:  # also by the variables of an engine
        sys.stderr.write(f"{error}\n")
        return ExitCode.REFUSED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
