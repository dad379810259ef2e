"""`hydra/launcher=sequential`, the default: the jobs of a sweep one after another in this process."""

import logging
import sys
from collections.abc import Sequence

from hydra.core.utils import JobReturn, JobStatus, configure_log
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from foundry.config.composition.hydra_application import error_of
from foundry.config.schemas.root import to_config
from foundry.config.schemas.tracking import JSON
from foundry.core.errors import format_reason
from foundry.launch.claim import run_job
from foundry.launch.launchers import ComposedJob, FrozenLauncher, Ledger, queue_job
from foundry.run_dir.lock import RunDirectoryLostError, is_held
from foundry.run_dir.status import read_status, write_status

_log = logging.getLogger(__name__)


class SequentialLauncher(FrozenLauncher):
    """Launcher that runs each job to its end; a failure is recorded, and the next job starts."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store the task function too, because this launcher calls it in this process."""
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        self._task = task_function

    def prepare(self, job: ComposedJob) -> None:
        """Write nothing: Hydra writes the files when the job starts."""

    def run(self, jobs: Sequence[ComposedJob]) -> None:
        """Run the jobs in order.

        Raises:
            Stopped: a signal arrived; the current job has saved, and the following jobs stay queued.
        """
        is_json = self._master.tracking.progress == JSON  # JSON of the jobs must be alone on standard output
        ledger = Ledger(jobs, stream=sys.stderr if is_json else None)
        for job in jobs:
            if is_held(job.run_dir):
                ledger.note(job, "running", "in another process; this process does not wait for it")
                continue
            queue_job(job.run_dir, to_config(job.config))
            ledger.note(job, "running")
            result = run_job(
                hydra_context=self._context,
                task_function=self._task,
                config=job.config,
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
            )
            if result.status is JobStatus.FAILED:
                _record(job, result)
            hydra = self._master.hydra
            configure_log(hydra.hydra_logging, hydra.verbose)
            ledger.note_end(job)


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
