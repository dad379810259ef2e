"""`hydra/launcher=sequential`, the default: the jobs of a sweep one after another in this process."""

import logging
from collections.abc import Collection, Sequence

from hydra.core.utils import JobReturn, JobStatus, configure_log
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from foundry.config.composition.hydra_application import error_of
from foundry.config.schemas.root import to_config
from foundry.core.errors import format_reason
from foundry.launch.claim import run_job
from foundry.launch.composed_job import ComposedJob
from foundry.launch.job_state import JobState, Phase
from foundry.launch.launchers import FrozenLauncher, queue_job
from foundry.run_dir.lock import RunDirectoryLostError
from foundry.run_dir.status import read_status, write_status

_log = logging.getLogger(__name__)


class SequentialLauncher(FrozenLauncher):
    """Launcher that runs each job to its end; a failure is recorded, and the next job starts."""

    in_process = True
    skips_locked = True

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store the task function too, because this launcher calls it in this process."""
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        self._task = task_function

    def prepare(self, job: ComposedJob) -> None:
        """Record the job as queued; Hydra writes its files when the job starts."""
        queue_job(job.run_dir, to_config(job.config))

    def places(self, configs: Sequence[DictConfig], limit: int) -> int:
        """Return 1: jobs run one after the other."""
        return 1

    def submit(self, jobs: Sequence[ComposedJob]) -> dict[int, str]:
        """Run jobs to their ends.

        Raises:
            Stopped: a signal arrived; the current job has saved.
        """
        for job in jobs:
            result = run_job(
                hydra_context=self._context,
                task_function=self._task,
                config=job.config,
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
            )
            if result.status is JobStatus.FAILED:
                _record(job, result)
            hydra = self.master.hydra
            configure_log(hydra.hydra_logging, hydra.verbose)
        return {job.index: str(job.index) for job in jobs}

    def poll(self, ids: Collection[str]) -> dict[str, JobState]:
        """Return that the jobs have ended."""
        return {job_id: JobState(phase=Phase.ENDED, detail="it recorded no end", outcome="lost") for job_id in ids}

    def cancel(self, ids: Collection[str], *, kill: bool = False) -> None:
        """Do nothing: no job runs outside of `submit`."""

    def logs(self, job_id: str) -> str:
        """Return nothing: a job prints to the terminal."""
        return ""

    def wait(self, seconds: float) -> None:
        """Return at once: no job runs outside of `submit`."""


def _record(job: ComposedJob, result: JobReturn) -> None:
    """Write the traceback to the job's log, and the reason to status.json unless the run has recorded its failure."""
    error = error_of(result)
    assert error is not None
    # Level info is only for the log file, because a sweep's terminal has one line for each job.
    _log.info("%s failed\n%s", job, getattr(error, "trace", ""), exc_info=error)
    is_lost = isinstance(error, RunDirectoryLostError)
    if not is_lost and read_status(job.run_dir).get("state") != "failed":  # keeps the run's own reason
        job.run_dir.mkdir(parents=True, exist_ok=True)
        write_status(job.run_dir, state="failed", reason=format_reason(error))
