"""`hydra/launcher=sequential`, the default: the jobs of a sweep one after the other, in this process."""

import logging
from collections.abc import Sequence
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus, configure_log
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from foundry.config.schemas.root import to_config
from foundry.launch.claim import run_job
from foundry.launch.launchers import FrozenLauncher, Job, Ledger
from foundry.launch.status import fail, queue
from foundry.run_dir.lock import is_held

_log = logging.getLogger(__name__)


class SequentialLauncher(FrozenLauncher):
    """Runs each job to its end; one that fails is recorded, and the next one starts."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra knows."""
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        self._task = task_function

    def prepare(self, composed: DictConfig, words: tuple[str, ...], label: str) -> Job:
        """Nothing to write: Hydra does when the job's turn comes."""
        run_dir = Path(str(composed.hydra.sweep.dir), str(composed.hydra.sweep.subdir)).absolute()
        return Job(number=int(composed.hydra.job.num), words=words, label=label, run_dir=run_dir, composed=composed)

    def run(self, jobs: Sequence[Job]) -> None:
        """Run the jobs, in order.

        Raises:
            Stopped: a signal came; the job has saved, and the next ones stay queued.
        """
        ledger = Ledger(jobs)
        for job in jobs:
            if is_held(job.run_dir):
                ledger.note(job, "running", "in another process, which this one does not wait for")
                continue
            queue(job.run_dir, to_config(job.composed))
            ledger.note(job, "running")
            result = run_job(
                hydra_context=self._context,
                task_function=self._task,
                config=job.composed,
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
            )
            if result.status is JobStatus.FAILED:
                _record(job, result)
            hydra = self._master.hydra
            configure_log(hydra.hydra_logging, hydra.verbose)
            ledger.settled(job)


def _record(job: Job, result: JobReturn) -> None:
    """Put the traceback into the job's log, and its last line into status.json."""
    error = result._return_value  # the property would raise it
    # At a level that is only for the file: a sweep's terminal has a line for each job.
    _log.info("%s failed\n%s", job, getattr(error, "trace", ""), exc_info=error)
    fail(job.run_dir, error)
