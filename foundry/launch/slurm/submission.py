"""Batch scripts of Slurm jobs: written by submitit, tested on the cluster, submitted."""

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any
from uuid import uuid4

from foundry.config.schemas.launcher import Slurm
from foundry.core.errors import ConfigError, Violation
from foundry.launch.job_state import Unreachable
from foundry.launch.slurm.end import Submission
from foundry.launch.slurm.open_submission import OpenSubmission
from foundry.launch.slurm.queue import Rejected, refusal, submit_script
from foundry.launch.snapshot import copied_folders
from foundry.run_dir.files import write_atomically

# Ignore signals until submitit installs its handlers: in these seconds a signal would end the task, and the job with it
# for good. Slurm requeues a preempted job that is still alive when the grace time ends. `exec` keeps ignored signals
# ignored (POSIX).
_HARDENED_PYTHON = f'sh -c \'trap "" USR1 USR2 TERM; exec "$@"\' sh {shlex.quote(sys.executable)}'
# Settings that are not passed to submitit.
_TOO_LARGE = "Invalid job array specification"
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
        if text := refusal(_script_text(settings, None, num_jobs, command="true")):
            raise _rejection(text)


def submit(
    task: Callable[[str], None],
    settings: Slurm,
    run_dirs: Sequence[Path],
    *,
    sweep_dir: Path,
    cluster: str,
    code: Path | None,
) -> list[Submission]:
    """Submit jobs as an array, after a record of the submission that outlives this process.

    Args:
        task: function that each task of a job calls with its run directory.
        settings: launcher settings, the same for all these jobs.
        run_dirs: run directory of each job.
        sweep_dir: sweep directory, which has no open submission.
        cluster: name of the cluster.
        code: folder with a snapshot of the code to import; None without a snapshot.

    Returns:
        The submission of each job, which is also saved in its run directory.

    Raises:
        ConfigError: Slurm rejects the jobs.
        Unreachable: Slurm does not respond; the open submission tells later whether the jobs were submitted.
    """
    from submitit.core.utils import DelayedSubmission, JobPaths

    folder = Path(settings.submitit_folder).absolute()
    script = JobPaths.get_first_id_independent_folder(folder) / f"{uuid4().hex}.sh"
    script.parent.mkdir(parents=True, exist_ok=True)
    opened = OpenSubmission(
        script=str(script),
        folder=str(folder),
        cluster=cluster,
        run_dirs=tuple(map(str, run_dirs)),
        stderr_to_stdout=settings.stderr_to_stdout,
        last_seen=time.time(),
    )
    with clean_environment():
        write_atomically(script, _script_text(settings, code, len(run_dirs), opened=opened))
        for number, run_dir in enumerate(run_dirs):
            submission = DelayedSubmission(task, str(run_dir))
            submission.set_timeout(settings.timeout_min, settings.max_num_timeout)
            submission.dump(opened.pickle_path(number))
        opened.save(sweep_dir)
        try:
            job_id = submit_script(script)
        except Rejected as error:
            opened.discard(sweep_dir)
            raise _rejection(str(error)) from None
        except Unreachable:
            opened.renew(sweep_dir)
            raise
    return opened.complete(sweep_dir, job_id)


def _script_text(
    settings: Slurm,
    code: Path | None,
    num_jobs: int,
    *,
    command: str | None = None,
    opened: OpenSubmission | None = None,
) -> str:
    """Return the batch script of jobs; `command` replaces the command of each task, whose files are in `opened`."""
    executor = _executor(settings, code, [] if opened is None else opened.shell_lines())._executor
    if num_jobs > 1:
        executor.parameters["map_count"] = num_jobs
    if opened is not None:
        logs = {"output": opened.slurm_log, "error": opened.slurm_log}
        executor.parameters["additional_parameters"] = logs | executor.parameters.get("additional_parameters", {})
    text: str = executor._make_submission_file_text(command or executor._submitit_command_str, "")
    return text


def _rejection(text: str) -> ConfigError:
    if _TOO_LARGE in text:
        text += "; the cluster limits the jobs of an array (MaxArraySize): lower hydra.sweeper.max_batch_size"
    return ConfigError(Violation("hydra.launcher", f"Slurm rejects the jobs: {text}"))


def _executor(settings: Slurm, code: Path | None, setup: Sequence[str]) -> Any:
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
        slurm_setup=[*setup, *_environment_of_job(code), *(settings.setup or [])],
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
