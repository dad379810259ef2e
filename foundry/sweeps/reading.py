"""Current state of a sweep, read from its directory: its jobs, their states and metrics, and the best one."""

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from foundry.config.composition.job_overrides import (
    brief,
    format_command,
    key_and_value,
    recorded_overrides,
    short_names,
)
from foundry.core.errors import ConfigError, Violation
from foundry.core.exit_codes import ExitCode
from foundry.run_dir.files import read_tail
from foundry.run_dir.lock import is_held
from foundry.run_dir.names import KUBERNETES, LOG, PLAN, RESULT, STATUS, SUBMISSION, SWEEP
from foundry.run_dir.redact import one_line
from foundry.run_dir.rung import Rung
from foundry.run_dir.status import FAILED, STATES, WAITING, load_status
from foundry.run_dir.strict_json import DamagedFileError, read_object
from foundry.run_dir.sweep_file import read_sweep_file
from foundry.sweeps.job import Job
from foundry.tracking.humanize import duration
from foundry.tracking.metrics_file import read_curve

NOT_RUNNING = "the sweep is not running; the same command resumes it"
"""Note on queued jobs that no process will start."""

_QUIET_SECONDS = 300.0  # runs that log rarely or evaluate for a long time can be silent for minutes
_ON_THIS_MACHINE = ("sequential", "local", "submitit_local")  # any other launcher may use Slurm, also a user's YAML


class Which(Enum):
    """The evaluation that supplies the metric for comparing jobs."""

    last = "last"
    best = "best"


@dataclass(frozen=True, kw_only=True)
class JobReport:
    """State of a job of a sweep.

    Attributes:
        job: the job; `job.swept` contains all overrides if the job is not listed in a sweep.json.
        state: state in status.json; `queued` if the file does not exist, `running` if a process holds the job's lock,
            `lost` if the process of a running job has died, `unknown` if the file is unreadable.
        is_going: whether the job is running or will still be started; a paused job may be, while its search runs.
        note: why the job failed, stopped, paused, was pruned or will not start, or for how long it has been silent; or
            which of its files is damaged.
        step: number of completed optimizer steps.
        metric: the sweep's metric; of an unfinished job from its latest evaluation, or its best one if `which` is best.
        interval: lower and upper bound of a finished job's metric, if its evaluations measured them as `<metric>_low`
            and `<metric>_high`.
        rung: number of rungs that the job has reached; None if its search has no rungs.
        seconds: time from the job's last start to its last status update, or until now if the job is running.
        result: result.json of a finished job.
        slurm_id: Slurm's id of a job that is pending or running in Slurm; otherwise empty.
        kubernetes_job: `namespace` and `job_id` of a job that waits or runs in Kubernetes; otherwise empty.
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
    kubernetes_job: dict[str, Any] = field(default_factory=dict)
    interval: tuple[float, float] | None = None
    rung: int | None = None

    @property
    def index(self) -> int:
        """Number of the job."""
        return self.job.index

    @cached_property
    def values(self) -> dict[str, str]:
        """Swept values by key; for a repeated key, the last value."""
        return dict(key_and_value(override) for override in self.job.swept)

    @property
    def log(self) -> Path:
        """Path of the job's log."""
        return self.run_dir / LOG

    @property
    def is_pruned(self) -> bool:
        """Whether a search ended the job early because other trials were better."""
        return bool(self.result.get("pruned"))

    @property
    def is_complete(self) -> bool:
        """Whether the job finished and was not pruned, so that its metric belongs to a complete run."""
        return self.state == "finished" and not self.is_pruned

    @property
    def has_failed(self) -> bool:
        """Whether the job ended without a result: its state is `failed` or `lost`."""
        return self.state in FAILED

    @property
    def has_metric(self) -> bool:
        """Whether the job has a finite metric, which can be compared."""
        return self.metric is not None and math.isfinite(self.metric)

    @property
    def has_diverged(self) -> bool:
        """Whether the metric is NaN or infinite, of a job that has not failed."""
        return self.metric is not None and not math.isfinite(self.metric) and not self.has_failed

    def rank(self, *, minimize: bool) -> tuple[int, bool, int, bool, float, int]:
        """Return a sort key: jobs by state, finished ones first, and within a state the best metric first.

        Jobs that a search has paused or pruned at a higher rung come first, because they have trained longer.
        """
        value = self.metric if self.metric is not None and self.has_metric else 0.0
        height = self.rung or 0 if self.state == "paused" or self.is_pruned else 0
        order = value if minimize else -value
        return _state_rank(self.state), self.is_pruned, -height, not self.has_metric, order, self.index


@dataclass(frozen=True, kw_only=True)
class SweepReport:
    """State of a sweep.

    Attributes:
        metric: metric for comparing jobs.
        minimize: whether lower is better.
        which: the evaluation that supplies the metric.
        jobs: the jobs in the order of `JobReport.rank`.
        names: keys whose values differ between jobs, with their short display names.
        command: arguments of the command that last started the sweep; empty if unknown.
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
        """Best complete job with a finite metric; without any, the best unfinished or pruned job with such a metric."""
        comparable = [job for job in self.jobs if job.has_metric and not job.has_failed]
        return next((job for job in comparable if job.is_complete), next(iter(comparable), None))

    @property
    def metric_name(self) -> str:
        """Name of the metric, prefixed with "best" unless it is from the last evaluation."""
        return f"best {self.metric}" if self.which is Which.best else self.metric

    @property
    def has_intervals(self) -> bool:
        """Whether a job's metric has an interval."""
        return any(job.interval is not None for job in self.jobs)

    @property
    def has_rungs(self) -> bool:
        """Whether the search pauses its jobs at rungs."""
        return any(job.rung is not None for job in self.jobs)

    @property
    def counts(self) -> dict[str, int]:
        """Number of jobs by state, in the order of the table."""
        counter = Counter(job.state for job in self.jobs)
        return {state: counter[state] for state in sorted(counter, key=_state_rank)}

    @property
    def is_going(self) -> bool:
        """Whether a job is running or will be started."""
        return any(job.is_going for job in self.jobs)

    @property
    def exit_code(self) -> int:
        """Exit code: 0 if all jobs have finished, 1 if one has failed or is lost, 3 otherwise."""
        if any(job.has_failed for job in self.jobs):
            return ExitCode.FAILED
        is_finished = all(job.state == "finished" for job in self.jobs)
        return ExitCode.SUCCESS if is_finished else ExitCode.UNFINISHED

    def repeat(self, job: JobReport) -> str:
        """Return the shell command that repeats a job."""
        # Hydra's record also has the overrides that all jobs share.
        overrides = recorded_overrides(job.run_dir) or job.job.swept
        return format_command(overrides, self.command)

    def settings(self, job: JobReport) -> str:
        """Return the swept values of a job as text, such as `lr=0.001 seed=2`."""
        return " ".join(f"{name}={brief(job.values[key])}" for key, name in self.names.items() if key in job.values)


def _state_rank(state: str) -> int:
    return STATES.index(state) if state in STATES else len(STATES)


def evaluations(job: JobReport, metric: str) -> list[tuple[int, float]]:
    """Return (optimizer step, value) pairs of a metric from a job's metrics.jsonl, ascending; none if unreadable."""
    try:
        points = [(step, _float(value)) for step, value in read_curve(job.run_dir, metric)]
    except (OSError, ValueError):
        return []
    return [(step, value) for step, value in points if value is not None]


def read_sweep(
    folder: Path, which: Which = Which.last, *, locks: bool = True, now: datetime | None = None
) -> SweepReport:
    """Read a sweep's directory, or a folder that contains run directories.

    Args:
        folder: directory of the sweep.
        which: the evaluation that supplies the metric.
        locks: check the lock files to find out which processes are alive. False relies on status.json alone: the last
            job, which reads the sweep when its training is over, still holds its own lock.
        now: current time, for running jobs; None reads the clock.

    Raises:
        ConfigError: if the folder has no jobs, or the list of jobs is damaged.
    """
    facts = _facts(folder)
    metric = one_line(facts.get("metric", "val_loss"))
    minimize = facts.get("direction") != "maximize"
    reader = _Reader(
        metric=metric,
        minimize=minimize,
        which=which,
        now=now or datetime.now(UTC),
        locks=locks,
        is_running=not (locks and "jobs" in facts and is_held(folder) is False),
        may_be_on_slurm=facts.get("launcher") not in _ON_THIS_MACHINE,
    )
    jobs = [reader.read(job, folder / job.dir) for job in _list_jobs(folder, facts)]
    if not jobs:
        hint = "; give the folder that contains it" if os.path.lexists(folder / STATUS) else ""
        kind = "a single run" if hint else f"a folder without {SWEEP} and without run directories in it"
        raise ConfigError(Violation("dir", f"is {folder}, {kind}{hint}"))
    jobs.sort(key=lambda job: job.rank(minimize=minimize))
    return SweepReport(
        folder=folder,
        metric=metric,
        minimize=minimize,
        which=which,
        jobs=tuple(jobs),
        names=short_names(_differing_keys(jobs)),
        command=tuple(one_line(str(word)) for word in facts.get("command", ())),
    )


@dataclass(frozen=True, kw_only=True)
class _Reader:
    """Reader of jobs.

    Attributes:
        is_running: whether the process that starts the jobs is alive, or may be alive.
        may_be_on_slurm: whether Slurm may start submitted jobs without that process.
    """

    metric: str
    minimize: bool
    which: Which
    now: datetime
    locks: bool
    is_running: bool
    may_be_on_slurm: bool

    def read(self, job: Job, run_dir: Path) -> JobReport:
        """Return the state of a job."""
        state, status, problem = self._state(run_dir)
        is_waiting = state in WAITING
        may_be_submitted = self.may_be_on_slurm and (is_waiting or state == "running")
        submission = _read(run_dir / SUBMISSION)[0] if may_be_submitted else {}
        kubernetes_job = _read(run_dir / KUBERNETES)[0] if may_be_submitted else {}
        slurm_id = one_line(str(submission.get("job_id", "")))
        total_steps = _read(run_dir / PLAN)[0].get("total_steps")
        result, result_problem = _read(run_dir / RESULT) if state == "finished" else ({}, "")
        updated = _time(status.get("updated"))
        report = JobReport(
            job=job,
            run_dir=run_dir,
            state=state,
            is_going=state == "running"
            or (is_waiting and (self.is_running or bool(slurm_id or kubernetes_job)))
            or (state == "paused" and self.is_running),
            note="",
            step=status.get("step"),
            total_steps=total_steps if isinstance(total_steps, int) else None,
            metric=None,
            seconds=self._seconds(state, _time(status.get("started")), updated),
            result=result,
            slurm_id=slurm_id,
            rung=_reached_rung(run_dir, is_at_rung=state == "paused" or bool(result.get("pruned"))),
            kubernetes_job=kubernetes_job,
        )
        note = problem or result_problem or self._note(report, status.get("reason", ""), updated)
        metric = self._metric(report) if status else None
        return replace(report, note=note, metric=metric, interval=self._interval(report))

    def _state(self, run_dir: Path) -> tuple[str, dict[str, Any], str]:
        """Return the job's state, its status.json, and the problem with that file (empty for none)."""
        status, problem = _read_status(run_dir)
        state = "unknown" if problem else status.get("state", "queued")
        if self.locks and state != "finished":
            is_locked = is_held(run_dir)
            if is_locked:
                return "running", status, problem
            if state == "running" and is_locked is False:
                status, problem = _read_status(run_dir)  # again: the job may have ended before the lock was checked
                state = "unknown" if problem else status.get("state", "queued")
                return ("lost" if state == "running" else state), status, problem
        return state, status, problem

    def _note(self, job: JobReport, reason: str, updated: datetime | None) -> str:
        silent_seconds = (self.now - updated).total_seconds() if updated is not None else 0.0
        if job.is_pruned:
            return one_line(str(job.result["pruned"]))
        if job.state == "lost" and not reason:
            return f"its process has ended; last update {duration(silent_seconds)} ago"
        if job.state == "running":
            return f"no update for {duration(silent_seconds)}" if silent_seconds > _QUIET_SECONDS else ""
        if job.state in WAITING and not job.is_going:
            return NOT_RUNNING
        return one_line(reason) or (_last_line(job.log) if job.state == "failed" else "")

    def _seconds(self, state: str, started: datetime | None, updated: datetime | None) -> float | None:
        if state == "queued":
            return None
        end = self.now if state == "running" else updated
        return None if started is None or end is None else max((end - started).total_seconds(), 0.0)

    def _metric(self, job: JobReport) -> float | None:
        metrics = job.result.get("best") if self.which is Which.best else job.result
        if isinstance(metrics, dict) and (value := _float(metrics.get(self.metric))) is not None:
            return value
        values = [value for _, value in evaluations(job, self.metric)]
        if self.which is Which.best:
            values = [value for value in values if math.isfinite(value)]
            return (min if self.minimize else max)(values, default=None)
        return values[-1] if values else None

    def _interval(self, job: JobReport) -> tuple[float, float] | None:
        names = [f"{self.metric}_low", f"{self.metric}_high"]
        ends = [_float(job.result.get(name)) for name in names]
        best = job.result.get("best")
        if self.which is Which.best and None not in ends and isinstance(best, dict):
            ends = [dict(evaluations(job, name)).get(best.get("step", -1)) for name in names]
        low, high = ends
        return None if low is None or high is None or not math.isfinite(low + high) else (low, high)


def _facts(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ConfigError(Violation("dir", f"is {folder}, which is not a folder; give the directory of a sweep"))
    try:
        return read_sweep_file(folder)
    except FileNotFoundError:
        return {}
    except DamagedFileError as error:
        raise ConfigError(Violation("dir", f"is {folder}, whose list of jobs cannot be read: {error}")) from None


def _list_jobs(folder: Path, facts: Mapping[str, Any]) -> list[Job]:
    """Return the jobs in sweep.json, else the run directories in the folder, with Hydra's recorded overrides.

    Raises:
        ConfigError: if the folder cannot be read.
    """
    if "jobs" in facts:
        jobs = map(Job.recorded, facts["jobs"])
        return [replace(job, swept=tuple(map(one_line, job.swept))) for job in jobs]
    try:
        names = [entry.name for entry in os.scandir(folder) if os.path.lexists(Path(entry.path, STATUS))]
    except OSError as error:
        raise ConfigError(Violation("dir", f"is {folder}, whose jobs cannot be listed: {error}")) from None
    are_numbered = all(name.isdecimal() for name in names)
    names.sort(key=lambda name: (int(name) if are_numbered else 0, name))
    return [
        Job(swept=recorded_overrides(folder / name), index=int(name) if are_numbered else number, dir=name)
        for number, name in enumerate(names)
    ]


def _read(path: Path) -> tuple[dict[str, Any], str]:
    """Return the JSON object in a file, and the problem with the file.

    If the file is missing or damaged, the object is empty.
    """
    try:
        return read_object(path), ""
    except FileNotFoundError:
        return {}, ""
    except DamagedFileError as error:
        return {}, one_line(f"{path.name} {error.reason}")


def _reached_rung(run_dir: Path, *, is_at_rung: bool) -> int | None:
    """Return the number of rungs that a job has reached; None if its search has no rungs."""
    try:
        rung = Rung.load(run_dir)
    except DamagedFileError:
        return None
    return None if rung is None else rung.number if is_at_rung else rung.number - 1


def _read_status(run_dir: Path) -> tuple[dict[str, Any], str]:
    try:
        status = load_status(run_dir)
    except DamagedFileError as error:
        return {}, one_line(f"{STATUS} {error.reason}")
    if status and status["state"] not in STATES:
        return {}, one_line(f"{STATUS} has the unknown state {status['state']!r}")
    return status, ""


def _float(value: object) -> float | None:
    """Return a number as a float, NaN if it is too large for one; None for other types."""
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return math.nan


def _time(text: object) -> datetime | None:
    try:
        time = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def _last_line(path: Path) -> str:
    return next((line for text in reversed(read_tail(path).split("\n")) if (line := one_line(text))), "")


def _differing_keys(jobs: Sequence[JobReport]) -> list[str]:
    """Return the keys whose values differ between jobs, in the order of the overrides."""
    keys = dict.fromkeys(key for job in jobs for key in job.values)
    return [key for key in keys if len({job.values.get(key) for job in jobs}) > 1]
