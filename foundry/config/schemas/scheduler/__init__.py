"""`scheduler=`: the learning rate as a function of the samples consumed."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from foundry.config.setting import setting
from foundry.core.duration import Budget, Duration, Phases
from foundry.core.errors import Violation

if TYPE_CHECKING:
    from foundry.config.environment import Launch
    from foundry.config.schemas.root import Config


class EvaluateAt(Enum):
    """Evaluation point of the schedule for an update that consumes samples a to b."""

    end = "end"
    start = "start"


class DecayStyle(Enum):
    """Shape of WSD's decay phase."""

    exponential = "exponential"
    linear = "linear"
    cosine = "cosine"
    minus_sqrt = "minus_sqrt"


class IncrementStyle(Enum):
    """Interpolation of the weight decay from its start value to its end value."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """Settings of all schedules: warm-up, horizon and minimum of the learning rate, and the weight decay schedule."""

    _target_: str
    warmup: str = setting(
        "1000",
        "duration of the linear warm-up; a fraction refers to the horizon",
        parse=Duration.parse,
        runtime=True,
    )
    clamp_warmup: bool = setting(
        False,
        "shorten a warm-up that is too long to all but the last step, with a warning, instead of refusing it",
    )
    warmup_init: float = setting(0.0, "learning rate at the start of the warm-up", ge=0)
    horizon: str = setting(
        "1.0",
        "duration of the schedule, including the warm-up; the learning rate reaches its floor at the end; can be "
        "longer than the run",
        parse=Duration.parse_positive,
    )
    min_lr: float = setting(
        0.0,
        "learning rate at the end of the horizon",
        ge=0,
        runtime=True,
    )
    force_min_lr: float = setting(0.0, "minimum learning rate after the warm-up", ge=0)
    evaluate_at: EvaluateAt = setting(
        EvaluateAt.end,
        "learning rate of an update that consumes samples a..b: end: at b, so that the last update reaches min_lr; "
        "start: at a",
    )
    start_weight_decay: float | None = setting(
        None,
        "weight decay at the start of its schedule; null here and for the end: optimizer.weight_decay throughout",
        ge=0,
    )
    end_weight_decay: float | None = setting(None, "weight decay at the end of its schedule", ge=0)
    weight_decay_incr_style: IncrementStyle = setting(
        IncrementStyle.constant, "shape of the weight decay schedule, rising or falling: constant, linear, cosine"
    )
    weight_decay_horizon: str | None = setting(
        None,
        "duration of the weight decay schedule; null: the run, or the horizon if that is longer",
        parse=Duration.parse_positive,
    )

    def phases(self, budget: Budget) -> Phases:
        """Convert the lengths of the phases to samples, for a run of this budget.

        Raises:
            ValueError: a length is in tokens, but the data has no tokens.
        """
        return Phases.resolve(
            budget,
            warmup=self.warmup,
            horizon=self.horizon,
            decay=getattr(self, "decay", None),
            weight_decay_horizon=self.weight_decay_horizon,
            clamp_warmup=self.clamp_warmup,
        )

    def check(self) -> Iterator[Violation]:
        """Check that the settings of the weight decay do not contradict each other."""
        start, end, style = self.start_weight_decay, self.end_weight_decay, self.weight_decay_incr_style
        if (start is None) != (end is None):
            present, missing = ("end", "start") if start is None else ("start", "end")
            yield Violation(
                f"scheduler.{missing}_weight_decay", f"is null but {present}_weight_decay is set; set both or neither"
            )
        elif style is IncrementStyle.constant:
            if start != end:
                yield Violation(
                    "scheduler.weight_decay_incr_style",
                    f"is constant but start_weight_decay={start:g} and end_weight_decay={end:g} differ; "
                    "choose linear or cosine",
                )
            if self.weight_decay_horizon is not None:
                yield Violation(
                    "scheduler.weight_decay_horizon",
                    f"is {self.weight_decay_horizon} but a constant weight decay has no horizon; set it to null",
                )
        elif start is None:
            yield Violation(
                "scheduler.weight_decay_incr_style",
                f"is {style.value} but start_weight_decay and end_weight_decay are null; set both",
            )

    def check_with(self, run: "Config", launch: "Launch") -> Iterator[Violation]:
        """Check that `min_lr`, `force_min_lr` and `warmup_init` are not above the peak, `hparams.lr`."""
        lr = run.hparams.lr
        for name in ("min_lr", "force_min_lr", "warmup_init"):
            if getattr(self, name) > lr:
                yield Violation(
                    f"scheduler.{name}", f"is {getattr(self, name):g} but hparams.lr is only {lr:g}; lower it"
                )


@dataclass(frozen=True, kw_only=True)
class Constant(Scheduler):
    """Settings of a constant learning rate after the warm-up."""

    _target_: str = "foundry.schedules.Constant.from_durations"

    def check(self) -> Iterator[Violation]:
        """Check that `min_lr` and `force_min_lr`, which have no effect on a constant learning rate, are 0."""
        yield from super().check()
        for name in ("min_lr", "force_min_lr"):
            if getattr(self, name) != 0:
                yield Violation(
                    f"scheduler.{name}",
                    f"is {getattr(self, name):g} but scheduler=constant has no decay; set it to 0, or choose another",
                )


@dataclass(frozen=True, kw_only=True)
class Linear(Scheduler):
    """Settings of a linear decay from the peak to min_lr."""

    _target_: str = "foundry.schedules.Linear.from_durations"


@dataclass(frozen=True, kw_only=True)
class Cosine(Scheduler):
    """Settings of a cosine decay from the peak to min_lr."""

    _target_: str = "foundry.schedules.Cosine.from_durations"


@dataclass(frozen=True, kw_only=True)
class InverseSquareRoot(Scheduler):
    """Settings of a decay with sqrt(warm-up samples / samples), then an abrupt drop to min_lr past the horizon."""

    _target_: str = "foundry.schedules.InverseSquareRoot.from_durations"


@dataclass(frozen=True, kw_only=True)
class WSD(Scheduler):
    """Warm-up, a stable phase at the peak, then a decay at the end of the horizon."""

    _target_: str = "foundry.schedules.WSD.from_durations"
    decay: str = setting(
        "0.3",
        "duration of the decay, which ends at the horizon; a fraction refers to the horizon",
        parse=Duration.parse_positive,
    )
    decay_style: DecayStyle = setting(
        DecayStyle.exponential,
        "shape of the decay: exponential, linear, cosine, minus_sqrt",
    )
