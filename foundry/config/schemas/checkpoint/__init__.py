"""`checkpoint=`: when checkpoints are saved, which are kept, and how a run resumes from them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from foundry.config.schemas.evaluation import Mode
from foundry.config.setting import OnResume, setting
from foundry.config.sources import why_no_url
from foundry.core.duration import Budget, Duration, Interval
from foundry.core.errors import Violation, as_text
from foundry.run_dir.mirror.store import why_not_a_store


class SchedulerOnResume(Enum):
    """Source of the learning-rate and weight-decay schedule of a resumed run."""

    match = "match"
    config = "config"
    checkpoint = "checkpoint"


class OnChangedConfig(Enum):
    """Action if a run is resumed with settings that change its computation."""

    error = "error"
    warn = "warn"


@dataclass(frozen=True, kw_only=True)
class KeepBest:
    """Settings for keeping the checkpoint of the best evaluation, in addition to the newest ones."""

    metric: str | None = setting(
        "${evaluation.metric}",
        "evaluation metric that determines the best checkpoint; null: no best checkpoint is kept",
        on_resume=OnResume.allowed,
    )
    mode: Mode = setting(
        "${mode_of:${.metric}}", "min: lower is better; max: higher is better", on_resume=OnResume.allowed
    )
    min_delta: float = setting(
        0.0, "an evaluation must improve on the best by more than this", ge=0, on_resume=OnResume.allowed
    )


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Settings of checkpoints, which are sharded safetensors files readable by any number of processes."""

    resume: str = setting(
        "auto",
        "auto: resume from the newest complete checkpoint of the run directory; never: start anew, in a run "
        "directory without checkpoints; or the path of a run or checkpoint",
    )
    interval: str | None = setting(
        None,
        "duration between checkpoints; null: by time only",
        parse=Duration.parse_positive,
    )
    every_minutes: float | None = setting(10.0, "minutes between checkpoints; null: by interval only", gt=0, le=10**9)
    keep_last: int = setting(2, "number of newest checkpoints to keep", ge=1)
    keep_every: int | None = setting(
        None, "never delete checkpoints of optimizer steps that are multiples of this; null: none", ge=1
    )
    keep_best: KeepBest = field(default_factory=KeepBest)
    save_final: bool = setting(True, "save a checkpoint at the end of the run")
    asynchronous: bool = setting(
        True, "write checkpoints in the background; training waits only for the copy to host memory"
    )
    strict_saves: bool = setting(
        False, "end the run if a checkpoint cannot be written; false: log the error and try again at the next interval"
    )
    scheduler_on_resume: SchedulerOnResume = setting(
        SchedulerOnResume.match,
        "schedule of a resumed run: config: from the configuration; checkpoint: from the checkpoint; match: both "
        "must be equal",
    )
    on_changed_config: OnChangedConfig = setting(
        OnChangedConfig.error, "action if a run is resumed with settings that change its computation: error, warn"
    )

    mirror: str | None = setting(
        None,
        "URL of a copy of checkpoints and small files, such as s3://BUCKET/RUN; the run resumes from it on another "
        "machine; a job of a sweep uses URL/JOB; null: no copy",
        on_resume=OnResume.same,
        since="0.1.0",
    )
    mirror_seconds: float = setting(
        30.0,
        "longest wait at the end of the run, or after a signal, for the copy to the mirror",
        ge=0,
        le=10**6,
        on_resume=OnResume.same,
        since="0.1.0",
    )

    @property
    def is_off(self) -> bool:
        """True if no checkpoint is ever saved, not even when a signal stops the run."""
        conditions = (self.interval, self.every_minutes, self.keep_best.metric)
        return not self.save_final and all(value is None for value in conditions)

    def interval_in(self, budget: Budget) -> Interval | None:
        """Return the interval between checkpoints in a run of this budget, or None if only time determines it.

        Raises:
            ValueError: the interval is longer than the run.
        """
        return None if self.interval is None else Interval.parse(self.interval, budget)

    def check(self) -> Iterator[Violation]:
        """Check that `resume` is not empty, and that `mirror` is a usable URL without credentials."""
        if not self.resume:
            yield Violation("checkpoint.resume", "is empty; give auto, never, or the path of a run or checkpoint")
        if self.mirror is None:
            return
        if (reason := why_not_a_store(self.mirror)) is not None:
            yield Violation("checkpoint.mirror", f"{reason} (given: {as_text(self.mirror)})")
        elif (reason := why_no_url(self.mirror)) is not None:
            message = (
                f"is {as_text(self.mirror)}, which this machine cannot use: {as_text(reason)}; install the package"
            )
            yield Violation("checkpoint.mirror", message)
        elif self.is_off:
            yield Violation("checkpoint.mirror", "has no effect with checkpoint=none; leave one of them out")
