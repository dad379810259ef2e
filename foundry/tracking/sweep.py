"""A sweep's directory, read: its jobs, what differs between them, and how each is doing."""

import math
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from foundry.config.errors import ConfigError, Violation
from foundry.records.lock import is_held
from foundry.records.strict_json import decode
from foundry.tracking.figures import duration
from foundry.tracking.metrics_file import read_metrics

SWEEP = "sweep.json"
"""The file in a sweep's directory that lists its jobs."""

_QUIET_SECONDS = 300.0  # a run that logs rarely, or evaluates for long, is silent for a while
_ORDER = ("finished", "running", "requeued", "queued", "stopped", "failed", "lost")
_GOING = {"running", "requeued", "queued"}
_FAILED = {"failed", "lost"}


class Which(Enum):
    """The evaluation by which jobs are compared."""

    last = "last"
    best = "best"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job of a sweep.

    Attributes:
        overrides: the job's words.
        state: that of status.json; `queued` before there is one, `lost` where its process is gone.
        note: why it failed or stopped, or that there is no sign of life.
        step: optimizer steps done.
        metric: what the sweep compares; of the latest evaluation where the job has not finished.
        seconds: since it was started last, until its last sign of life, or now.
        result: result.json of a finished job.
    """

    index: int
    run_dir: Path
    overrides: tuple[str, ...]
    state: str
    note: str
    step: int | None
    total_steps: int | None
    metric: float | None
    seconds: float | None
    result: dict[str, Any]

    @cached_property
    def values(self) -> dict[str, str]:
        """The overrides by key; of two for one key the later holds."""
        return dict(_key_and_value(word) for word in self.overrides)

    @property
    def log(self) -> Path:
        """The job's log."""
        return self.run_dir / "foundry.log"

    @property
    def is_going(self) -> bool:
        """Whether it may still come to an end by itself."""
        return self.state in _GOING

    @property
    def has_failed(self) -> bool:
        """Whether it came to an end without a result."""
        return self.state in _FAILED

    @property
    def has_metric(self) -> bool:
        """Whether the metric can be compared."""
        return self.metric is not None and math.isfinite(self.metric)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep as it stands.

    Attributes:
        metric: what jobs are compared by.
        minimize: whether lower is better.
        which: the evaluation that counts.
        jobs: the best first, those that have failed last.
        names: the keys whose values differ between jobs, with the short names they are shown by.
        command: the words that it was started with, where they are known.
    """

    folder: Path
    metric: str
    minimize: bool
    which: Which
    jobs: tuple[Job, ...]
    names: dict[str, str]
    command: tuple[str, ...]

    @property
    def best(self) -> Job | None:
        """The best of the finished jobs; while none has finished, of those that may."""
        comparable = [job for job in self.jobs if job.has_metric and not job.has_failed]
        return next((job for job in comparable if job.state == "finished"), next(iter(comparable), None))

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

    def repeat(self, job: Job) -> str:
        """The command that does a job again, for a shell."""
        words = _recorded_words(job.run_dir) or job.overrides  # what Hydra wrote has those, too, that all jobs share
        is_sweep_by_words = not self.command or {"-m", "--multirun"} & set(self.command)
        mode = () if is_sweep_by_words else ("hydra.mode=RUN",)  # an option, such as hparams_search, makes it a sweep
        return shlex.join(["python", "-m", "foundry", *words, *mode])

    def settings(self, job: Job) -> str:
        """What tells a job from the others: `lr=0.001 seed=2`."""
        return " ".join(f"{name}={job.values[key]}" for key, name in self.names.items() if key in job.values)


def evaluations(job: Job, metric: str) -> list[tuple[int, float]]:
    """(optimizer step, value) of a metric in metrics.jsonl, ascending."""
    try:
        records = read_metrics(job.run_dir, having=metric)
    except (OSError, ValueError):
        return []
    return [(record["step"], float(record[metric])) for record in records]


def read_sweep(folder: Path, which: Which = Which.last, *, now: datetime | None = None) -> Sweep:
    """Read a sweep's directory, or one that holds run directories.

    Args:
        folder: of the sweep.
        which: the evaluation that counts.
        now: the time, for jobs that are running.

    Raises:
        ConfigError: there are no jobs in it.
    """
    facts = _facts(folder)
    metric, minimize = facts.get("metric") or "val_loss", facts.get("direction") != "maximize"
    reader = _Reader(metric=metric, minimize=minimize, which=which, now=now or datetime.now(UTC))
    jobs = [reader.read(index, run_dir, words) for index, run_dir, words in _listed(folder, facts)]
    if not jobs:
        hint = "; give the folder that holds it" if (folder / "status.json").exists() else ""
        kind = "a single run" if hint else f"a folder without {SWEEP} and without run directories in it"
        raise ConfigError(Violation("dir", f"is {folder}, {kind}{hint}"))
    jobs.sort(key=lambda job: _rank(job, minimize))
    return Sweep(
        folder=folder,
        metric=metric,
        minimize=minimize,
        which=which,
        jobs=tuple(jobs),
        names=_short_names(_differing(jobs)),
        command=tuple(facts.get("command") or ()),
    )


@dataclass(frozen=True, kw_only=True)
class _Reader:
    """Reads one job after another."""

    metric: str
    minimize: bool
    which: Which
    now: datetime

    def read(self, index: int, run_dir: Path, overrides: tuple[str, ...]) -> Job:
        """A job as it stands."""
        status = _read(run_dir / "status.json")
        state = status.get("state", "queued")
        if state != "finished":
            held = is_held(run_dir)
            if held:
                state = "running"
            elif state == "running" and held is False:
                status = _read(run_dir / "status.json")  # it may have ended between the two looks
                state = "lost" if status.get("state") == "running" else status.get("state", "queued")
        updated = _time(status.get("updated"))
        job = Job(
            index=index,
            run_dir=run_dir,
            overrides=overrides,
            state=state,
            note=self._note(state, status, run_dir, updated),
            step=status.get("step"),
            total_steps=_read(run_dir / "plan.json").get("total_steps"),
            metric=None,
            seconds=self._seconds(state, _time(status.get("started")), updated),
            result=_read(run_dir / "result.json") if state == "finished" else {},
        )
        return replace(job, metric=self._metric(job)) if status else job

    def _note(self, state: str, status: Mapping[str, Any], run_dir: Path, updated: datetime | None) -> str:
        silent = (self.now - updated).total_seconds() if updated is not None else 0.0
        if state == "lost":
            return f"the process is gone; last sign of life {duration(silent)} ago"
        if state == "running":
            return f"no sign of life for {duration(silent)}" if silent > _QUIET_SECONDS else ""
        reason = " ".join(str(status.get("reason") or "").split())
        return reason or (_last_line(run_dir / "foundry.log") if state == "failed" else "")

    def _seconds(self, state: str, started: datetime | None, updated: datetime | None) -> float | None:
        if state == "queued":
            return None
        end = self.now if state == "running" else updated
        return None if started is None or end is None else max((end - started).total_seconds(), 0.0)

    def _metric(self, job: Job) -> float | None:
        known = job.result.get("best") or {} if self.which is Which.best else job.result
        if isinstance(value := known.get(self.metric), int | float):
            return float(value)
        values = [value for _, value in evaluations(job, self.metric)]
        if self.which is Which.best:
            values = [value for value in values if math.isfinite(value)]
            return (min if self.minimize else max)(values, default=None)
        return values[-1] if values else None


def _facts(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ConfigError(Violation("dir", f"is {folder}, which is no folder; give the directory of a sweep"))
    path = folder / SWEEP
    facts = _read(path)
    if path.exists() and not isinstance(facts.get("jobs"), list):
        raise ConfigError(Violation("dir", f"is {folder}, whose {SWEEP} cannot be read as a list of jobs"))
    return facts


def _listed(folder: Path, facts: Mapping[str, Any]) -> Iterable[tuple[int, Path, tuple[str, ...]]]:
    """Index, run directory and words of each job: as recorded, or as found."""
    if "jobs" in facts:
        for job in facts["jobs"]:
            yield int(job["index"]), folder / job["dir"], tuple(job["overrides"])
        return
    found = [Path(entry.path) for entry in os.scandir(folder) if Path(entry.path, "status.json").is_file()]
    are_numbered = all(run_dir.name.isdecimal() for run_dir in found)
    found.sort(key=lambda run_dir: (int(run_dir.name) if are_numbered else 0, run_dir.name))
    for number, run_dir in enumerate(found):
        yield int(run_dir.name) if are_numbered else number, run_dir, _recorded_words(run_dir)


def _recorded_words(run_dir: Path) -> tuple[str, ...]:
    import yaml

    try:
        words = yaml.safe_load((run_dir / ".hydra" / "overrides.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return ()
    return tuple(str(word) for word in words) if isinstance(words, list) else ()


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where the file is missing or broken."""
    try:
        value = decode(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _time(text: object) -> datetime | None:
    try:
        return datetime.fromisoformat(str(text))
    except ValueError:
        return None


def _last_line(path: Path, reach: int = 4096) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - reach, 0))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _key_and_value(word: str) -> tuple[str, str]:
    key, _, value = word.partition("=")
    return key.lstrip("+"), value


def _place(state: str) -> int:
    return _ORDER.index(state) if state in _ORDER else len(_ORDER)


def _rank(job: Job, minimize: bool) -> tuple[int, bool, float, int]:
    value = job.metric if job.metric is not None and job.has_metric else 0.0
    return _place(job.state), not job.has_metric, value if minimize else -value, job.index


def _differing(jobs: Sequence[Job]) -> list[str]:
    """The keys whose values are not the same in all jobs, in the order of the words."""
    keys = dict.fromkeys(key for job in jobs for key in job.values)
    return [key for key in keys if len({job.values.get(key) for job in jobs}) > 1]


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last part of each key, or all of it where two end in the same."""
    last = {key: key.rpartition(".")[2] for key in keys}
    counted = Counter(last.values())
    return {key: name if counted[name] == 1 else key for key, name in last.items()}
