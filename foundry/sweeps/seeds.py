"""Groups of jobs that differ only in their seeds, with mean and standard deviation of the metric."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, stdev

from foundry.sweeps.reading import JobReport, SweepReport


def is_seed(key: str) -> bool:
    """Return whether a swept key is a seed, such as `hparams.seed`; jobs that differ only in it repeat a setting."""
    return key.rpartition(".")[2] == "seed"


@dataclass(frozen=True, kw_only=True)
class SeedGroup:
    """Jobs with equal settings and different seeds.

    Attributes:
        values: values of the swept keys that are not seeds.
        jobs: all jobs of the group, in any state.
    """

    values: Mapping[str, str]
    jobs: tuple[JobReport, ...]

    @property
    def measured(self) -> list[float]:
        """Finite metrics of the complete jobs."""
        return [job.metric for job in self.jobs if job.is_complete and job.has_metric and job.metric is not None]

    @property
    def mean(self) -> float | None:
        """Mean of the measured metrics; None if no metric is measured."""
        return fmean(self.measured) if self.measured else None

    @property
    def std(self) -> float | None:
        """Sample standard deviation (n - 1); None for fewer than two measured metrics."""
        return stdev(self.measured) if len(self.measured) > 1 else None

    @property
    def has_losses(self) -> bool:
        """Whether a job has failed or diverged, so that the mean excludes the worst results."""
        return any(job.has_failed or job.has_diverged for job in self.jobs)

    def rank(self, *, minimize: bool) -> tuple[bool, bool, float]:
        """Return a sort key: the best mean first, then groups with failed or diverged jobs, then unmeasured groups."""
        mean = math.inf if self.mean is None else self.mean if minimize else -self.mean
        return self.mean is None, self.has_losses, mean


def seed_groups(sweep: SweepReport) -> list[SeedGroup]:
    """Group the jobs by their settings without seeds, the best mean first.

    The list is empty if no setting has several seeds.
    """
    keys = [key for key in sweep.names if not is_seed(key)]
    if len(keys) == len(sweep.names):
        return []
    jobs_by_values: dict[tuple[str | None, ...], list[JobReport]] = {}
    for job in sweep.jobs:
        jobs_by_values.setdefault(tuple(job.values.get(key) for key in keys), []).append(job)
    if all(len(jobs) == 1 for jobs in jobs_by_values.values()):
        return []
    groups = [
        SeedGroup(
            values={key: value for key, value in zip(keys, values, strict=True) if value is not None},
            jobs=tuple(jobs),
        )
        for values, jobs in jobs_by_values.items()
    ]
    return sorted(groups, key=lambda group: group.rank(minimize=sweep.minimize))
