"""`sweep.json`: the jobs of a sweep, written before the first of them starts, and read when it goes on."""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foundry.config.errors import ConfigError, Violation
from foundry.config.frozen import hash_config, plain, read_recorded
from foundry.config.resume_compat import Difference, differences
from foundry.config.schemas.root import Config
from foundry.run_dir.files import inside, write_atomically
from foundry.run_dir.status import read_status
from foundry.run_dir.strict_json import DamagedFileError, check_types, read_object
from foundry.sweeps.grid import Job

FILE_NAME = "sweep.json"
_TYPES = {"command": list, "created": str, "launcher": str, "metric": str, "direction": str, "jobs": list}
_JOB_TYPES = {"index": int, "dir": str, "overrides": list, "config_hash": str, "id": str}
_KEY = "hydra.sweep.dir"
_MOST_JOBS_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class SweepJob:
    """A job as the sweep's directory knows it.

    Attributes:
        index: its number; a sweep that goes on does not give it to another.
        dir: its run directory, relative to the sweep's.
        overrides: what it has otherwise than other jobs.
        config_hash: of its configuration.
        id: of its overrides.
    """

    index: int
    dir: str
    overrides: tuple[str, ...]
    config_hash: str
    id: str

    def __str__(self) -> str:
        return f"job {self.index} ({', '.join(self.overrides)})" if self.overrides else f"job {self.index}"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A sweep.

    Attributes:
        command: the words it was last started with.
        created: when it was first started, in ISO 8601.
        launcher: the chosen `hydra/launcher`.
        metric: what jobs are compared by.
        direction: `minimize` or `maximize`.
        jobs: all of them, in the order of their indices, also those that only an earlier start had.
    """

    command: tuple[str, ...]
    created: str
    launcher: str
    metric: str
    direction: str
    jobs: tuple[SweepJob, ...] = ()

    @classmethod
    def load(cls, sweep_dir: Path) -> "Manifest | None":
        """What the directory holds; None where no sweep has been.

        Raises:
            ConfigError: what it holds cannot be read.
        """
        try:
            content = read_object(sweep_dir / FILE_NAME, needed=_TYPES)
            jobs = tuple(_job(sweep_dir, job) for job in content["jobs"])
        except FileNotFoundError:
            return None
        except DamagedFileError as error:
            message = f"is {sweep_dir}, but {error}; restore that file, or choose another directory"
            raise ConfigError(Violation(_KEY, message)) from None
        facts = {name: content[name] for name in ("created", "launcher", "metric", "direction")}
        return cls(command=tuple(map(str, content["command"])), **facts, jobs=jobs)

    @classmethod
    def begin(
        cls, sweep_dir: Path, command: Sequence[str], *, launcher: str, metric: str, direction: str
    ) -> "Manifest":
        """A sweep about to start; with the jobs of the one that the directory holds, if any."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        fresh = cls(command=tuple(command), created=now, launcher=launcher, metric=metric, direction=direction)
        earlier = cls.load(sweep_dir)
        return fresh if earlier is None else replace(fresh, created=earlier.created, jobs=earlier.jobs)

    def save(self, sweep_dir: Path) -> None:
        """Write it; a reader sees the old one or the new one."""
        sweep_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(sweep_dir / FILE_NAME, json.dumps(asdict(self), indent=2) + "\n", durable=True)

    def number(self, jobs: Sequence[Job]) -> list[int]:
        """The index of each job: its old one where it has one, else the next that is free."""
        known = {job.id: job.index for job in self.jobs}
        free = itertools.count(1 + max(known.values(), default=-1))
        return [known[job.id] if job.id in known else next(free) for job in jobs]

    def with_jobs(self, jobs: Sequence[SweepJob]) -> "Manifest":
        """The sweep with these jobs, whether it knew them or not."""
        merged = {job.index: job for job in (*self.jobs, *jobs)}
        return replace(self, jobs=tuple(merged[index] for index in sorted(merged)))

    def check(self, sweep_dir: Path, jobs: Sequence[SweepJob], configs: Sequence[Config]) -> None:
        """Refuse to go on with a sweep whose jobs are to be others than they were.

        Raises:
            ConfigError: with each setting that differs, and the jobs where it does.
        """
        known = {job.id: job for job in self.jobs}
        changed: dict[str, list[SweepJob]] = {}
        for job, config in zip(jobs, configs, strict=True):
            if job.id in known and known[job.id].config_hash != job.config_hash:
                for difference in _changes(sweep_dir / known[job.id].dir, config):
                    changed.setdefault(str(difference), []).append(job)
        said = [f"holds this sweep with {text} in {_listed(jobs)}; give what it had" for text, jobs in changed.items()]
        for job in jobs:
            status = read_status(sweep_dir / job.dir)
            if job.id not in known and status and status.get("config_hash") != job.config_hash:
                said.append(f"holds another run in {job.dir}, where {job} would be")
        if said:
            raise ConfigError([Violation(_KEY, f"{sweep_dir} {text}, or choose another directory") for text in said])


def sweep_job(index: int, folder: str, job: Job, config: Config) -> SweepJob:
    """The entry of a job that will run in `folder`, relative to the sweep's."""
    return SweepJob(index=index, dir=folder, overrides=job.swept, config_hash=hash_config(config), id=job.id)


def _job(sweep_dir: Path, entry: Any) -> SweepJob:
    """An entry of the file.

    Raises:
        DamagedFileError: it is none, or leads out of the directory.
    """
    path = sweep_dir / FILE_NAME
    if not isinstance(entry, dict):
        raise DamagedFileError(path, "has a job that is no JSON object")
    check_types(path, entry, needed=_JOB_TYPES)
    try:
        inside(sweep_dir, entry["dir"])
    except ValueError as error:
        raise DamagedFileError(path, f"has a job whose directory {error}") from None
    return SweepJob(**{name: entry[name] for name in _JOB_TYPES} | {"overrides": tuple(map(str, entry["overrides"]))})


def _changes(run_dir: Path, config: Config) -> Iterator[Difference]:
    """How a job's configuration differs from the one its run directory holds."""
    now = plain(config)
    del now["hparams"]["accum_freq"]
    was = read_recorded(run_dir) or {}
    if isinstance(hparams := was.get("hparams"), dict):
        hparams.pop("accum_freq", None)
    return differences({str(key): value for key, value in was.items()}, now)


def _listed(jobs: Sequence[SweepJob]) -> str:
    names = ", ".join(map(str, jobs[:_MOST_JOBS_NAMED]))
    left = len(jobs) - _MOST_JOBS_NAMED
    return f"{names} and {left} more" if left > 0 else names
