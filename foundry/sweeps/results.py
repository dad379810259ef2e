"""A sweep as it stands: its jobs, how each is doing, which is the best, and what differs between them."""

import math
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from foundry.config.composition.job_overrides import brief, format_command, key_and_value, recorded_overrides
from foundry.run_dir.names import LOG
from foundry.run_dir.status import FAILED, STATES
from foundry.sweeps.job import Job


class Which(Enum):
    """The evaluation by which jobs are compared."""

    last = "last"
    best = "best"


@dataclass(frozen=True, kw_only=True)
class JobReport:
    """How a job of a sweep is doing.

    Attributes:
        job: the job; of one that no sweep.json lists, `swept` are all its overrides.
        state: that of status.json; `queued` before there is one, `lost` where its process is gone, `unknown` where it
            cannot be read.
        is_going: whether it may still come to an end by itself.
        note: why it failed, stopped, was pruned or will not start, or that there is no sign of life.
        step: optimizer steps done.
        metric: what the sweep compares; of the latest evaluation where the job has not finished.
        interval: of a finished job, the least and the largest value that the metric may really have, where its
            evaluations measured them as `<metric>_low` and `<metric>_high`.
        seconds: since it was started last, until its last sign of life, or now.
        result: result.json of a finished job.
        slurm_id: what Slurm calls a job that it has and that has not ended, else empty.
    """

    job: Job
    run_dir: Path
    state: str
    is_going: bool
    note: str
    step: int | None
    total_steps: int | None
    metric: float | None
    seconds: float | None
    result: dict[str, Any]
    slurm_id: str = ""
    interval: tuple[float, float] | None = None

    @property
    def index(self) -> int:
        """The job's number."""
        return self.job.index

    @cached_property
    def values(self) -> dict[str, str]:
        """What was swept, by key; of two for one key the later holds."""
        return dict(key_and_value(override) for override in self.job.swept)

    @property
    def log(self) -> Path:
        """The job's log."""
        return self.run_dir / LOG

    @property
    def is_pruned(self) -> bool:
        """Whether a search ended it early, for promising less than others."""
        return bool(self.result.get("pruned"))

    @property
    def is_complete(self) -> bool:
        """Whether its metric is that of a whole run."""
        return self.state == "finished" and not self.is_pruned

    @property
    def has_failed(self) -> bool:
        """Whether it came to an end without a result."""
        return self.state in FAILED

    @property
    def has_metric(self) -> bool:
        """Whether the metric can be compared."""
        return self.metric is not None and math.isfinite(self.metric)

    @property
    def has_diverged(self) -> bool:
        """Whether the metric is NaN or infinite."""
        return self.metric is not None and not math.isfinite(self.metric) and not self.has_failed

    def rank(self, *, minimize: bool) -> tuple[int, bool, bool, float, int]:
        """What jobs are sorted by: the best first, those that have failed last."""
        value = self.metric if self.metric is not None and self.has_metric else 0.0
        return _place(self.state), self.is_pruned, not self.has_metric, value if minimize else -value, self.index


@dataclass(frozen=True, kw_only=True)
class SweepReport:
    """A sweep as it stands.

    Attributes:
        metric: what jobs are compared by.
        minimize: whether lower is better.
        which: the evaluation that counts.
        jobs: the best first, those that have failed last.
        names: the keys whose values differ between jobs, with the short names they are shown by.
        command: the overrides that it was started with, where they are known.
    """

    folder: Path
    metric: str
    minimize: bool
    which: Which
    jobs: tuple[JobReport, ...]
    names: dict[str, str]
    command: tuple[str, ...]

    @property
    def best(self) -> JobReport | None:
        """The best of the jobs that ran to their end; while there is none, of those that may."""
        comparable = [job for job in self.jobs if job.has_metric and not job.has_failed]
        return next((job for job in comparable if job.is_complete), next(iter(comparable), None))

    @property
    def metric_name(self) -> str:
        """The metric, and of which evaluation where it is not the last."""
        return f"best {self.metric}" if self.which is Which.best else self.metric

    @property
    def has_intervals(self) -> bool:
        """Whether a job's metric has an interval."""
        return any(job.interval is not None for job in self.jobs)

    @property
    def counts(self) -> dict[str, int]:
        """Jobs by state, in the order of the table."""
        counted = Counter(job.state for job in self.jobs)
        return {state: counted[state] for state in sorted(counted, key=_place)}

    @property
    def is_going(self) -> bool:
        """Whether a job is running or will."""
        return any(job.is_going for job in self.jobs)

    @property
    def exit_code(self) -> int:
        """0: all jobs have finished; 1: one has failed or is lost; 3: none has, and some have not finished."""
        if any(job.has_failed for job in self.jobs):
            return 1
        return 0 if all(job.state == "finished" for job in self.jobs) else 3

    def repeat(self, job: JobReport) -> str:
        """The command that does a job again, for a shell."""
        # What Hydra wrote has those, too, that all jobs share.
        overrides = recorded_overrides(job.run_dir) or job.job.swept
        return format_command(overrides, self.command)

    def settings(self, job: JobReport) -> str:
        """What tells a job from the others: `lr=0.001 seed=2`."""
        return " ".join(f"{name}={brief(job.values[key])}" for key, name in self.names.items() if key in job.values)


def _place(state: str) -> int:
    return STATES.index(state) if state in STATES else len(STATES)
