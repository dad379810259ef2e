"""A job to start, with its composed configuration."""

import sys
from dataclasses import dataclass
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, open_dict

from foundry.run_dir.names import LOG
from foundry.run_dir.result import read_result
from foundry.run_dir.status import read_status


class JobFailed(Exception):
    """A job did not finish; the message contains its name, its state and the reason."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ComposedJob:
    """A job to start, with its composed configuration.

    Attributes:
        index: number of the job in the sweep.
        overrides: all overrides of the job.
        label: overrides that differ between the jobs.
        run_dir: absolute path of the run directory.
        config: the whole configuration, including Hydra's.
    """

    index: int
    overrides: tuple[str, ...]
    label: str
    run_dir: Path
    config: DictConfig

    def __str__(self) -> str:
        return f"job {self.index} ({self.label})" if self.label else f"job {self.index}"

    @property
    def command(self) -> list[str]:
        """The command that executes the run; its exit code is the run's."""
        return [sys.executable, "-m", "foundry.sweeps.worker", str(self.run_dir), "trust=true"]

    @property
    def state(self) -> str:
        """The state in the job's status.json; "lost" without one."""
        return str(read_status(self.run_dir).get("state", "lost"))

    def result(self, *, detached: bool) -> JobReturn:
        """Return the result for Hydra's sweeper: the metric, the reason of a failure, or None if the job continues."""
        returned = JobReturn(
            overrides=list(self.overrides), working_dir=str(self.run_dir), task_name=self.config.hydra.job.name
        )
        state = self.state
        if state in ("finished", "paused"):
            returned.return_value = read_result(self.run_dir).get("metric")
            returned.status = JobStatus.COMPLETED
        elif detached:
            returned.return_value = None
            returned.status = JobStatus.COMPLETED
        else:
            reason = read_status(self.run_dir).get("reason", "")
            returned.return_value = JobFailed(f"{self} is {state}: {reason}; see {self.run_dir / LOG}")
            returned.status = JobStatus.FAILED
        return returned


def set_number(config: DictConfig, number: int) -> None:
    """Set the number of a job in its configuration; `hydra.sweep.subdir` is derived from it."""
    with open_dict(config):
        config.hydra.job.num = number
        config.hydra.job.id = str(number)
