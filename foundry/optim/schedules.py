"""Learning rate and weight decay as pure functions of the number of samples consumed.

The curves are Megatron-LM's (`optimizer_param_scheduler.py`, core 0.20), whose unit is one sample; the order of
operations is kept, so that the numbers agree bit for bit.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any, Self

from foundry.config.configured import configured_by
from foundry.config.schemas.scheduler import WSD as WSDSettings
from foundry.config.schemas.scheduler import DecayStyle, EvaluateAt, IncrementStyle
from foundry.config.schemas.scheduler import Scheduler as Settings
from foundry.core.duration import Budget


@dataclass(frozen=True, kw_only=True)
class WeightDecay:
    """Weight decay from `start` to `end`, rising or falling; it has no warm-up.

    Attributes:
        start: the value at the beginning.
        end: the value from the horizon on.
        horizon: samples at whose end the value is `end`.
        style: the way between them.

    Raises:
        ValueError: the horizon is empty, or the values of a constant differ.
    """

    start: float
    end: float
    horizon: float
    style: IncrementStyle

    def __post_init__(self) -> None:
        if self.style is IncrementStyle.constant and self.start != self.end:
            raise ValueError(f"a constant weight decay cannot go from {self.start:g} to {self.end:g}")
        if self.style is not IncrementStyle.constant and self.horizon <= 0:
            raise ValueError(f"weight decay cannot change within {self.horizon:g} samples")

    def at(self, samples: float) -> float:
        """The value after `samples` samples: start + f (end - start), with r the elapsed share of the horizon.

        f is r for linear and (cos(pi (1 - r)) + 1) / 2 for cosine. At the horizon it is `end` itself, which that sum
        may miss by a rounding.
        """
        if self.style is IncrementStyle.constant or samples >= self.horizon:
            return self.end
        share = samples / self.horizon
        if self.style is IncrementStyle.cosine:
            share = 0.5 * (math.cos(math.pi * (1 - share)) + 1.0)
        return self.start + share * (self.end - self.start)


@dataclass(frozen=True, kw_only=True)
class Schedule(ABC):
    """What every schedule has: warm-up, horizon and floor of the learning rate, and perhaps a weight decay's curve.

    Attributes:
        max_lr: the peak.
        warmup: samples of the linear warm-up; may be fractional.
        warmup_init: the rate at its start.
        horizon: samples at whose end the rate has reached `min_lr`, warm-up included.
        min_lr: the rate past the horizon.
        force_min_lr: after the warm-up the rate never falls below this.
        evaluate_at: where an update that consumes samples a to b reads the curves: at b, or at a as Megatron-LM does.
        weight_decay_curve: None leaves the optimizer's own value alone.
    """

    max_lr: float
    warmup: float
    warmup_init: float = 0.0
    horizon: float
    min_lr: float = 0.0
    force_min_lr: float = 0.0
    evaluate_at: EvaluateAt = EvaluateAt.end
    weight_decay_curve: WeightDecay | None = None

    @classmethod
    @configured_by(Settings)
    def from_durations(cls, settings: Settings, *, max_lr: float, budget: Budget, **own: Any) -> Self:
        """Return the schedule of a run of this budget.

        Args:
            settings: lengths are durations, as `foundry.core.duration` reads them.
            max_lr: the peak.
            budget: of the run.
            own: fields that the class has besides those of its settings.

        Raises:
            ValueError: a length counts tokens and the data has none.
        """
        phases = settings.phases(budget)
        start, end, style = settings.start_weight_decay, settings.end_weight_decay, settings.weight_decay_incr_style
        curve = None
        if start is not None and end is not None:
            curve = WeightDecay(start=start, end=end, horizon=phases.weight_decay_horizon, style=style)
        lengths = {"warmup": phases.warmup, "horizon": phases.horizon, "decay": phases.decay}
        values = {**vars(settings), **lengths, "weight_decay_curve": curve}
        shared = {item.name: values[item.name] for item in fields(cls) if item.name in values}
        return cls(max_lr=max_lr, **{**shared, **own})

    def lr(self, samples_before: int, samples_after: int) -> float:
        """The learning rate of the update that consumes samples `samples_before` to `samples_after`."""
        return self.lr_at(samples_after if self.evaluate_at is EvaluateAt.end else samples_before)

    def weight_decay(self, samples_before: int, samples_after: int) -> float | None:
        """The weight decay of that update; None: what the optimizer was given."""
        if self.weight_decay_curve is None:
            return None
        return self.weight_decay_curve.at(samples_after if self.evaluate_at is EvaluateAt.end else samples_before)

    def lr_at(self, samples: float) -> float:
        """The value of the learning rate's curve after `samples` samples."""
        if self.warmup > 0 and samples <= self.warmup:
            return self.warmup_init + (self.max_lr - self.warmup_init) * samples / self.warmup
        return max(self.after_warmup(samples), self.force_min_lr)

    @abstractmethod
    def after_warmup(self, samples: float) -> float:
        """The value of the curve past the warm-up."""

    def phases(self) -> list[tuple[str, float]]:
        """The phases of the learning rate in order, each with the samples at whose end it ends."""
        return [("warmup", self.warmup), ("decay", self.horizon), ("floor", math.inf)]

    def state_dict(self) -> dict[str, Any]:
        """Every number the schedule is made of, as plain JSON, and its style."""
        return {"style": type(self).__name__, **_plain(asdict(self))}

    def _between(self, share: float) -> float:
        return self.min_lr + share * (self.max_lr - self.min_lr)

    def _elapsed(self, samples: float) -> float:
        """The share of the way from the end of the warm-up to the horizon."""
        return (samples - self.warmup) / (self.horizon - self.warmup)


class Constant(Schedule):
    """The peak rate, forever."""

    def phases(self) -> list[tuple[str, float]]:
        """No decay, and so no floor."""
        return [("warmup", self.warmup), ("constant", math.inf)]

    def after_warmup(self, samples: float) -> float:
        """The peak."""
        return self.max_lr


class Linear(Schedule):
    """A straight line down to `min_lr`."""

    def after_warmup(self, samples: float) -> float:
        """1 - r of the way from `min_lr` to the peak, r being the elapsed share."""
        return self.min_lr if samples > self.horizon else self._between(1.0 - self._elapsed(samples))


class Cosine(Schedule):
    """Half a cosine down to `min_lr`."""

    def after_warmup(self, samples: float) -> float:
        """(cos(pi r) + 1) / 2 of the way from `min_lr` to the peak, r being the elapsed share."""
        if samples > self.horizon:
            return self.min_lr
        return self._between(0.5 * (math.cos(math.pi * self._elapsed(samples)) + 1.0))


class InverseSquareRoot(Schedule):
    """The peak times the root of warm-up over samples, never below `min_lr`, to which it drops past the horizon."""

    def after_warmup(self, samples: float) -> float:
        """max(min_lr, max_lr sqrt(w) / sqrt(n)), with w and n at least one sample."""
        if samples > self.horizon:
            return self.min_lr
        return max(self.min_lr, self.max_lr * math.sqrt(max(self.warmup, 1)) / math.sqrt(max(samples, 1)))


@dataclass(frozen=True, kw_only=True)
class WSD(Schedule):
    """Warm-up, stable at the peak, then a decay that ends at the horizon (Hu et al., 2024).

    Attributes:
        decay: samples of the decay.
        decay_style: its shape.
    """

    decay: float
    decay_style: DecayStyle

    @classmethod
    @configured_by(WSDSettings)
    def from_durations(cls, settings: WSDSettings, *, max_lr: float, budget: Budget, **own: Any) -> Self:
        """Return the schedule of a run, as `Schedule.from_durations` does."""
        return super().from_durations(settings, max_lr=max_lr, budget=budget, **own)

    def phases(self) -> list[tuple[str, float]]:
        """The warm-up, the stable phase and the decay that ends it."""
        corners = [("stable", self.horizon - self.decay), ("decay", self.horizon)]
        return [("warmup", self.warmup), *corners, ("floor", math.inf)]

    def after_warmup(self, samples: float) -> float:
        """The peak until `horizon - decay`; then by `decay_style`, q being the elapsed share of the decay."""
        start = self.horizon - self.decay
        if samples <= start:
            return self.max_lr
        # At the horizon itself q would miss 1 by a rounding where the decay is fractional.
        if samples >= self.horizon:
            return self.min_lr
        return self._between(_anneal((samples - start) / self.decay, self.decay_style))


def _anneal(q: float, style: DecayStyle) -> float:
    match style:
        case DecayStyle.linear:
            return 1.0 - q
        case DecayStyle.cosine:
            return 0.5 * (math.cos(math.pi * q) + 1.0)
        case DecayStyle.exponential:
            return (2.0 * math.pow(0.5, q)) - 1.0
        case DecayStyle.minus_sqrt:
            return 1.0 - math.sqrt(q)


STYLES: dict[str, type[Schedule]] = {cls.__name__: cls for cls in (Constant, Linear, Cosine, InverseSquareRoot, WSD)}
"""The schedules by the name under which their state is saved."""


def from_state(state: dict[str, Any]) -> Schedule:
    """The schedule whose `state_dict` this is.

    Raises:
        ValueError: the style is unknown.
    """
    if state.get("style") not in STYLES:
        raise ValueError(f"{state.get('style')!r} is no schedule; there are: {', '.join(STYLES)}")
    own = {name: value for name, value in state.items() if name != "style"}
    own["evaluate_at"] = EvaluateAt(own["evaluate_at"])
    if "decay_style" in own:
        own["decay_style"] = DecayStyle(own["decay_style"])
    if (curve := own["weight_decay_curve"]) is not None:
        own["weight_decay_curve"] = WeightDecay(**{**curve, "style": IncrementStyle(curve["style"])})
    return STYLES[state["style"]](**own)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value.value if isinstance(value, Enum) else value
