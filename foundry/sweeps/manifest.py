"""Manifest of a sweep: numbers, directories and configuration hashes of its jobs, which a resumed sweep keeps."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from foundry.config.record.frozen import plain, read_recorded
from foundry.config.record.resume_compat import Difference, differences
from foundry.config.schemas.root import Config
from foundry.core.errors import ConfigError, Violation, listed
from foundry.run_dir.status import read_status
from foundry.run_dir.strict_json import DamagedFileError
from foundry.run_dir.sweep_file import read_sweep_file, write_sweep_file
from foundry.sweeps.job import Job

_KEY = "hydra.sweep.dir"
_MOST_JOBS_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class SweepManifest:
    """Content of a `sweep.json`.

    Attributes:
        command: command-line arguments of the sweep's last start.
        created: time of the sweep's first start, in ISO 8601.
        launcher: the chosen `hydra/launcher`.
        metric: metric for comparing jobs.
        direction: `minimize` or `maximize`.
        jobs: all jobs in the order of their indices, including the jobs of earlier starts.
    """

    command: tuple[str, ...]
    created: str
    launcher: str
    metric: str
    direction: str
    jobs: tuple[Job, ...] = ()

    @classmethod
    def load(cls, sweep_dir: Path) -> "SweepManifest | None":
        """Load the manifest of a sweep directory; None if the directory has no `sweep.json`.

        Raises:
            ConfigError: if `sweep.json` cannot be read.
        """
        try:
            content = read_sweep_file(sweep_dir, to_resume=True)
        except FileNotFoundError:
            return None
        except DamagedFileError as error:
            message = f"is {sweep_dir}, but {error}; restore that file, or choose another directory"
            raise ConfigError(Violation(_KEY, message)) from None
        facts = {name: content[name] for name in ("created", "launcher", "metric", "direction")}
        return cls(command=tuple(map(str, content["command"])), **facts, jobs=tuple(map(Job.recorded, content["jobs"])))

    @classmethod
    def begin(
        cls, sweep_dir: Path, command: Sequence[str], *, launcher: str, metric: str, direction: str
    ) -> "SweepManifest":
        """Return the manifest of a new start of a sweep, including the jobs of earlier starts in the directory."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        manifest = cls(command=tuple(command), created=now, launcher=launcher, metric=metric, direction=direction)
        previous = cls.load(sweep_dir)
        return manifest if previous is None else replace(manifest, created=previous.created, jobs=previous.jobs)

    def save(self, sweep_dir: Path) -> None:
        """Write `sweep.json`."""
        write_sweep_file(sweep_dir, {**vars(self), "jobs": [job.as_recorded() for job in self.jobs]})

    def number(self, jobs: Sequence[Job]) -> list[int]:
        """Return the index of each job: its existing index, or the next free one."""
        indices = {job.id: job.index for job in self.jobs}
        free = itertools.count(1 + max(indices.values(), default=-1))
        return [indices[job.id] if job.id in indices else next(free) for job in jobs]

    def with_jobs(self, jobs: Sequence[Job]) -> "SweepManifest":
        """Return the manifest with these jobs added or updated."""
        jobs_by_index = {job.index: job for job in (*self.jobs, *jobs)}
        return replace(self, jobs=tuple(jobs_by_index[index] for index in sorted(jobs_by_index)))

    def check(self, sweep_dir: Path, jobs: Sequence[Job], configs: Sequence[Config]) -> None:
        """Check that the jobs of a resumed sweep have the same configurations as before, and new jobs free directories.

        Raises:
            ConfigError: with each changed setting and the affected jobs, and each directory that holds another run.
        """
        jobs_by_id = {job.id: job for job in self.jobs}
        affected_jobs: dict[str, list[Job]] = {}
        for job, config in zip(jobs, configs, strict=True):
            if job.id in jobs_by_id and jobs_by_id[job.id].config_hash != job.config_hash:
                for difference in _changes(sweep_dir / jobs_by_id[job.id].dir, config):
                    affected_jobs.setdefault(str(difference), []).append(job)
        lines = [
            f"contains this sweep with {text} in {listed(jobs, _MOST_JOBS_NAMED)}; restore the old value"
            for text, jobs in affected_jobs.items()
        ]
        for job in jobs:
            status = read_status(sweep_dir / job.dir)
            if job.id not in jobs_by_id and status and status.get("config_hash") != job.config_hash:
                lines.append(f"contains another run in {job.dir}, the directory of {job}")
        if lines:
            raise ConfigError([Violation(_KEY, f"{sweep_dir} {text}, or choose another directory") for text in lines])


def _changes(run_dir: Path, config: Config) -> Iterator[Difference]:
    """Return the differences between a job's configuration and the one recorded in the run directory of the job."""
    new = plain(config)
    del new["hparams"]["accum_freq"]
    old = read_recorded(run_dir) or {}
    if isinstance(hparams := old.get("hparams"), dict):
        hparams.pop("accum_freq", None)
    return differences({str(key): value for key, value in old.items()}, new)
