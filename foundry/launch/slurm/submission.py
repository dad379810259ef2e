"""Batch scripts of Slurm jobs: written by submitit, tested on the cluster, submitted."""

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from foundry.config.schemas.launcher import Slurm
from foundry.core.errors import ConfigError, Violation
from foundry.launch.job_state import Unreachable
from foundry.launch.slurm.queue import refusal
from foundry.launch.snapshot import copied_folders

# Ignore signals until submitit installs its handlers: in these seconds a signal would end the task, and the job with it
# for good. Slurm requeues a preempted job that is still alive when the grace time ends. `exec` keeps ignored signals
# ignored (POSIX).
_HARDENED_PYTHON = f'sh -c \'trap "" USR1 USR2 TERM; exec "$@"\' sh {shlex.quote(sys.executable)}'
_NO_CONTROLLER = "Unable to contact slurm controller"
# Settings that are not passed to submitit.
_EXCLUDED = {"_target_", "submitit_folder", "detach", "snapshot_code", "max_num_timeout", "setup"}
# Options that submitit has for all executors, so their names do not begin with "slurm_".
_COMMON_OPTIONS = {"name", "timeout_min", "nodes", "tasks_per_node", "gpus_per_node", "cpus_per_task", "mem_gb"}
_COMMON_OPTIONS |= {"stderr_to_stdout"}


def check_script(settings: Slurm, num_jobs: int) -> None:
    """Test whether Slurm accepts the batch script of an array of jobs, without running it.

    Raises:
        ConfigError: Slurm rejects the script.
        Unreachable: Slurm does not respond.
    """
    with clean_environment():
        executor = _executor(settings, None)._executor
        if num_jobs > 1:
            executor.parameters["map_count"] = num_jobs
        if text := refusal(executor._make_submission_file_text(executor._submitit_command_str, "")):
            raise _rejection(text)


def submit(
    task: Callable[[str], None], settings: Slurm, run_dirs: Sequence[Path], code: Path | None
) -> list[tuple[str, Path]]:
    """Submit jobs as an array.

    Args:
        task: function that each task of a job calls with its run directory.
        settings: launcher settings, the same for all these jobs.
        run_dirs: run directory of each job.
        code: folder with a snapshot of the code to import; None without a snapshot.

    Returns:
        For each job its Slurm id, and the file with its error output.

    Raises:
        ConfigError: Slurm rejects the jobs.
        Unreachable: Slurm does not respond; no job was submitted.
    """
    from submitit.core.utils import FailedSubmissionError, UncompletedJobError

    try:
        with clean_environment():
            jobs = _executor(settings, code).map_array(task, list(map(str, run_dirs)))
    except (UncompletedJobError, FailedSubmissionError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise Unreachable(reason) if _NO_CONTROLLER in reason else _rejection(reason) from None
    return [(job.job_id, job.paths.stderr) for job in jobs]


def _rejection(text: str) -> ConfigError:
    return ConfigError(Violation("hydra.launcher", f"Slurm rejects the jobs: {text}"))


def _executor(settings: Slurm, code: Path | None) -> Any:
    import submitit

    folder = Path(settings.submitit_folder).absolute()
    executor = submitit.AutoExecutor(
        folder=folder,
        cluster="slurm",
        slurm_max_num_timeout=settings.max_num_timeout,
        slurm_python=_HARDENED_PYTHON,
    )
    options = {item.name: getattr(settings, item.name) for item in fields(settings) if item.name not in _EXCLUDED}
    # Drop None: submitit would write it into the script as text.
    parameters = {name: value for name, value in options.items() if value is not None}
    executor.update_parameters(
        **{name if name in _COMMON_OPTIONS else f"slurm_{name}": value for name, value in parameters.items()},
        slurm_setup=[*_environment_of_job(code), *(settings.setup or [])],
        # Ends the job if a rank fails; otherwise the other ranks would wait for the failed rank.
        slurm_srun_args=["--kill-on-bad-exit=1"],
    )
    return executor


def _environment_of_job(code: Path | None) -> list[str]:
    # Since Slurm 22.05, srun does not inherit --cpus-per-task from sbatch.
    lines = ["export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}"]
    # Keep `python -m` from searching the working directory first. An empty entry of PYTHONPATH would do so, too.
    lines += ["export PYTHONSAFEPATH=1"]
    if code is not None:
        import_path = ":".join(shlex.quote(str(folder)) for folder in (code, *copied_folders(code)))
        lines += [f'export PYTHONPATH={import_path}"${{PYTHONPATH:+:$PYTHONPATH}}"']
    return lines


@contextmanager
def clean_environment() -> Iterator[None]:
    """Hide the variables of the Slurm job that this process runs in, if any; SLURM_CONF is kept."""
    from submitit.helpers import clean_env

    config = os.environ.get("SLURM_CONF")
    with clean_env():
        if config is not None:
            os.environ["SLURM_CONF"] = config
        yield
