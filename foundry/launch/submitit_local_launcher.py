"""`hydra/launcher=submitit_local` of hydra-submitit-launcher: the jobs of a sweep on this machine, run by submitit.

submitit starts all jobs at once, and the tasks of a job as ranks that train together. submitit signals a job 30 seconds
before its time limit, and starts the job again; the run resumes from its checkpoint.

As with the plugin's launcher, jobs continue if this process is killed. Signals to this process are forwarded: jobs save
and stop.
"""

import math
import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from foundry.config.environment import default_variables, visible_gpus
from foundry.config.schemas.launcher import SubmititLocal, resolve_launcher
from foundry.core.errors import ConfigError, Violation
from foundry.core.safe_path import VARIABLE
from foundry.launch.composed_job import ComposedJob
from foundry.launch.job_state import JobState, Phase
from foundry.launch.launchers import FrozenLauncher
from foundry.launch.local import block_interrupts
from foundry.launch.slurm.submission import clean_environment
from foundry.launch.slurm.task import SlurmTask
from foundry.run_dir.files import read_tail

if TYPE_CHECKING:
    import subprocess

_OUT_OF_TIME = "its time limit was reached as often as submitit allows; the same command resumes it"
_LOST = "its processes ended without recording a reason"
_REPEAT_SECONDS = 2.0
"""Interval for repeating SIGTERM, which submitit ignores until a run has installed its handler."""
_GPUS = "hydra.launcher.gpus_per_node"
_REMEDY = "choose hydra/launcher=local"


class SubmititLocalLauncher(FrozenLauncher):
    """Launcher that runs jobs with submitit's executor for one machine, and waits for them."""

    skips_locked = True
    poll_seconds = (0.2, 0.2)

    def __init__(self, work: Callable[[Path], int], **settings: Any) -> None:
        super().__init__(work, **settings)
        self._submitted = dict[str, tuple[Any, ComposedJob]]()
        """The `submitit.Job` of each job by id, and the job."""
        self._next_signals = dict[str, float]()
        """Time of the next SIGTERM to each canceled job."""

    def check(self, configs: Sequence[DictConfig]) -> None:
        """Check that each job sees this machine's GPUs and does not share them.

        Raises:
            ConfigError: a job would not see its GPUs, or would share them; the message is about the first one.
        """
        gpus = visible_gpus()
        for config in configs:
            num_gpus = _resolve_settings(config).gpus_per_node
            if num_gpus is None and gpus:
                message = "has no value, so submitit would hide this machine's GPUs; set one for each process of a"
                raise ConfigError(Violation(_GPUS, f"{message} job, 0 for the CPU, or {_REMEDY}"))
            if num_gpus and num_gpus > len(gpus):
                raise ConfigError(Violation(_GPUS, f"is {num_gpus} but the number of visible GPUs is {len(gpus)}"))
            if num_gpus and not all(name.isdecimal() for name in gpus):
                message = f"is {num_gpus} but submitit needs CUDA_VISIBLE_DEVICES as numbers, not {gpus[0]}; {_REMEDY}"
                raise ConfigError(Violation(_GPUS, message))
            at_a_time = config.hydra.sweeper.get("max_batch_size") or len(configs)
            if num_gpus and min(at_a_time, len(configs)) > 1:
                message = f"is {num_gpus} but submitit starts all jobs at once, on the same GPUs"
                remedy = f"add hydra.sweeper.max_batch_size=1, or {_REMEDY}"
                raise ConfigError(Violation(_GPUS, f"{message}; {remedy}"))

    def submit(self, jobs: Sequence[ComposedJob]) -> dict[int, str]:
        """Start a controller process of submitit for each job."""
        ids = {}
        for job in jobs:
            submitted = _start(self.work, job)
            ids[job.index] = submitted.job_id
            self._submitted[submitted.job_id] = submitted, job
        return ids

    def poll(self, ids: Collection[str]) -> dict[str, JobState]:
        """Return the states of the controller processes; SIGTERM to a canceled job is repeated."""
        states = {}
        for job_id in ids:
            submitted, job = self._submitted[job_id]
            if not submitted.done():
                states[job_id] = JobState(phase=Phase.RUNNING)
                if time.monotonic() >= self._next_signals.get(job_id, math.inf):
                    self.cancel([job_id])
            elif job.state == "requeued":
                states[job_id] = JobState(phase=Phase.ENDED, detail=_OUT_OF_TIME, outcome="stopped")
            else:
                states[job_id] = JobState(phase=Phase.ENDED, detail=_LOST, outcome="lost")
        return states

    def cancel(self, ids: Collection[str], *, kill: bool = False) -> None:
        """Send SIGTERM to the tasks of jobs through their controllers, or SIGKILL to all of them."""
        for job_id in ids:
            controller = self._submitted[job_id][0]._process
            if kill:
                _kill(controller)
            else:
                controller.terminate()
                self._next_signals[job_id] = time.monotonic() + _REPEAT_SECONDS

    def logs(self, job_id: str) -> str:
        """Return the last line of the error output of rank 0."""
        lines = [line.strip() for line in read_tail(self._submitted[job_id][0].paths.stderr).splitlines()]
        return next((line for line in reversed(lines) if line), "")


def _kill(controller: "subprocess.Popen[bytes]") -> None:
    """Kill a controller and its tasks; processes of a task end with the task."""
    children = Path(f"/proc/{controller.pid}/task/{controller.pid}/children")
    with suppress(FileNotFoundError):
        tasks = children.read_text().split()
        controller.kill()  # first, so that it does not start the tasks again
        for task in tasks:
            with suppress(ProcessLookupError):
                os.kill(int(task), signal.SIGKILL)


def _start(work: Callable[[Path], int], job: ComposedJob) -> Any:
    """Start a job with submitit, and return the `submitit.Job`."""
    from submitit import LocalExecutor

    settings = _resolve_settings(job.config)
    executor = LocalExecutor(folder=Path(settings.submitit_folder).absolute())
    executor.update_parameters(
        timeout_min=settings.timeout_min,
        tasks_per_node=settings.tasks_per_node,
        gpus_per_node=settings.gpus_per_node or 0,
        visible_gpus=[int(name) for name in visible_gpus() if name.isdecimal()] if settings.gpus_per_node else (),
        stderr_to_stdout=settings.stderr_to_stdout,
    )
    variables = {VARIABLE: "1"}
    if settings.cpus_per_task is not None:
        variables["OMP_NUM_THREADS"] = str(settings.cpus_per_task)
    # Ctrl-C must reach only this process, which then terminates the jobs itself.
    with block_interrupts(), clean_environment(), default_variables(variables):
        return executor.submit(SlurmTask(work), str(job.run_dir))


def _resolve_settings(config: DictConfig) -> SubmititLocal:
    settings = resolve_launcher(config)
    assert isinstance(settings, SubmititLocal)
    return settings
