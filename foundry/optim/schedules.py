"""Learning rate, weight decay and momentum as pure functions of the number of consumed samples.

The curves are Megatron-LM's (`optimizer_param_scheduler.py`, core 0.20), in units of samples. The order of operations
is the same too, so the values agree bit for bit.
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
    """Weight decay schedule from `start` to `end`, increasing or decreasing, without warmup.

    Attributes:
        start: initial value.
        end: value from the horizon on.
        horizon: number of samples after which the value is `end`.
        style: shape of the curve.

    Raises:
        ValueError: the style is constant and `start` and `end` differ, or it is not constant and the horizon is 0.
    """

    start: float
    end: float
    horizon: float
    style: IncrementStyle

    def __post_init__(self) -> None:
        if self.style is IncrementStyle.constant and self.start != self.end:
            raise ValueError(f"a constant weight decay cannot change from {self.start:g} to {self.end:g}")
        if self.style is not IncrementStyle.constant and self.horizon <= 0:
            raise ValueError(f"weight decay cannot change within {self.horizon:g} samples")

    def at(self, samples: float) -> float:
        """Return the value after `samples` samples: start + f (end - start).

        With r = samples / horizon, f is r for linear and (cos(pi (1 - r)) + 1) / 2 for cosine. From the horizon on the
        value is exactly `end`, which the formula may miss by a rounding error.
        """
        if self.style is IncrementStyle.constant or samples >= self.horizon:
            return self.end
        share = samples / self.horizon
        if self.style is IncrementStyle.cosine:
            share = 0.5 * (math.cos(math.pi * (1 - share)) + 1.0)
        return self.start + share * (self.end - self.start)


@dataclass(frozen=True, kw_only=True)
class MomentumWarmup:
    """Linear rise of the momentum coefficient from `start` to `end`.

    Records of modded-nanogpt (Jordan et al., 2024, https://github.com/KellerJordan/modded-nanogpt) warm up the momentum
    of Muon from 0.85 to 0.95 over 300 steps.

    Attributes:
        start: coefficient before the first sample.
        end: coefficient after the warmup.
        samples: length of the warmup in samples, above 0; may be fractional.
    """

    start: float
    end: float
    samples: float

    def at(self, samples: float) -> float:
        """Return the coefficient after `samples` samples: start + r (end - start), with r = samples / warmup.

        From the end of the warmup on it is exactly `end`.
        """
        if samples >= self.samples:
            return self.end
        return self.start + samples / self.samples * (self.end - self.start)


@dataclass(frozen=True, kw_only=True)
class Schedule(ABC):
    """Base class of schedules: warmup, horizon and floor of the learning rate, and curves of weight decay and momentum.

    Attributes:
        max_lr: peak learning rate.
        warmup: samples of the linear warmup; may be fractional.
        warmup_init: learning rate at the start of the warmup.
        horizon: number of samples, including the warmup, after which the learning rate is `min_lr`.
        min_lr: learning rate after the horizon.
        force_min_lr: lower bound of the learning rate after the warmup.
        evaluate_at: point of the curves that applies to an update that consumes samples a to b: b, or a as in
            Megatron-LM.
        weight_decay_curve: weight decay schedule; None keeps the optimizer's own value.
        momentum_warmup: momentum schedule; None keeps the optimizer's own value.
    """

    max_lr: float
    warmup: float
    warmup_init: float = 0.0
    horizon: float
    min_lr: float = 0.0
    force_min_lr: float = 0.0
    evaluate_at: EvaluateAt = EvaluateAt.end
    weight_decay_curve: WeightDecay | None = None
    momentum_warmup: MomentumWarmup | None = None

    @classmethod
    @configured_by(Settings)
    def from_durations(cls, settings: Settings, *, max_lr: float, budget: Budget, **extra: Any) -> Self:
        """Return the schedule of a run with this budget.

        Args:
            settings: settings with lengths as durations, in the syntax of `foundry.core.duration`.
            max_lr: peak learning rate.
            budget: budget of the run.
            extra: further fields of the class that are not in its settings.

        Raises:
            ValueError: a length is given in tokens, but the data has no tokens.
        """
        phases = settings.phases(budget)
        start, end, style = settings.start_weight_decay, settings.end_weight_decay, settings.weight_decay_incr_style
        curve = None
        if start is not None and end is not None:
            curve = WeightDecay(start=start, end=end, horizon=phases.weight_decay_horizon, style=style)
        lengths = {"warmup": phases.warmup, "horizon": phases.horizon, "decay": phases.decay}
        values = {**vars(settings), **lengths, "weight_decay_curve": curve}
        common = {item.name: values[item.name] for item in fields(cls) if item.name in values}
        return cls(max_lr=max_lr, **{**common, **extra})

    def lr(self, samples_before: int, samples_after: int) -> float:
        """Return the learning rate of the update that consumes samples `samples_before` to `samples_after`."""
        return self.lr_at(self._point(samples_before, samples_after))

    def weight_decay(self, samples_before: int, samples_after: int) -> float | None:
        """Return the weight decay of the update with these sample counts; None keeps the optimizer's own value."""
        if self.weight_decay_curve is None:
            return None
        return self.weight_decay_curve.at(self._point(samples_before, samples_after))

    def momentum(self, samples_before: int, samples_after: int) -> float | None:
        """Return the momentum of the update with these sample counts; None keeps the optimizer's own value."""
        if self.momentum_warmup is None:
            return None
        return self.momentum_warmup.at(self._point(samples_before, samples_after))

    def lr_at(self, samples: float) -> float:
        """Return the learning rate after `samples` samples."""
        if self.warmup > 0 and samples <= self.warmup:
            return self.warmup_init + (self.max_lr - self.warmup_init) * samples / self.warmup
        return max(self.after_warmup(samples), self.force_min_lr)

    @abstractmethod
    def after_warmup(self, samples: float) -> float:
        """Return the learning rate after `samples` samples, past the warmup."""

    def phases(self) -> list[tuple[str, float]]:
        """Return the phases of the learning rate in order, each with the number of samples after which it ends."""
        return [("warmup", self.warmup), ("decay", self.horizon), ("floor", math.inf)]

    def state_dict(self) -> dict[str, Any]:
        """Return all fields and the style of the schedule as plain JSON, except a momentum warmup that is None."""
        state = {"style": type(self).__name__, **_to_plain(asdict(self))}
        if self.momentum_warmup is None:  # as in checkpoints of schedules without this field
            del state["momentum_warmup"]
        return state

    def _point(self, samples_before: int, samples_after: int) -> int:
        """Return the number of samples at which the curves apply to an update."""
        return samples_after if self.evaluate_at is EvaluateAt.end else samples_before

    def _between(self, share: float) -> float:
        return self.min_lr + share * (self.max_lr - self.min_lr)

    def _elapsed(self, samples: float) -> float:
        """Return the elapsed fraction of the way from the end of the warmup to the horizon."""
        return (samples - self.warmup) / (self.horizon - self.warmup)


class Constant(Schedule):
    """Constant peak learning rate after the warmup."""

    def phases(self) -> list[tuple[str, float]]:
        """Return the phases: warmup and constant, without decay and floor."""
        return [("warmup", self.warmup), ("constant", math.inf)]

    def after_warmup(self, samples: float) -> float:
        """Return the peak learning rate."""
        return self.max_lr


class Linear(Schedule):
    """Linear decay to `min_lr`."""

    def after_warmup(self, samples: float) -> float:
        """Return min_lr + (1 - r) (max_lr - min_lr), with r the elapsed fraction of the decay, at most 1."""
        return self.min_lr if samples > self.horizon else self._between(1.0 - self._elapsed(samples))


class Cosine(Schedule):
    """Cosine decay to `min_lr`."""

    def after_warmup(self, samples: float) -> float:
        """Return min_lr + (cos(pi r) + 1) / 2 (max_lr - min_lr), with r the elapsed share of the decay, at most 1."""
        if samples > self.horizon:
            return self.min_lr
        return self._between(0.5 * (math.cos(math.pi * self._elapsed(samples)) + 1.0))


class InverseSquareRoot(Schedule):
    """Inverse square root decay with `min_lr` as lower bound; the learning rate drops to `min_lr` after the horizon."""

    def after_warmup(self, samples: float) -> float:
        """Return max(min_lr, max_lr sqrt(w / n)), with warmup w and sample count n, both at least 1."""
        if samples > self.horizon:
            return self.min_lr
        return max(self.min_lr, self.max_lr * math.sqrt(max(self.warmup, 1)) / math.sqrt(max(samples, 1)))


@dataclass(frozen=True, kw_only=True)
class WSD(Schedule):
    """Warmup, stable phase at the peak, then a decay that ends at the horizon (Hu et al., 2024).

    Attributes:
        decay: samples of the decay.
        decay_style: shape of the decay.
    """

    decay: float
    decay_style: DecayStyle

    @classmethod
    @configured_by(WSDSettings)
    def from_durations(cls, settings: WSDSettings, *, max_lr: float, budget: Budget, **extra: Any) -> Self:
        """Return the schedule of a run, as in `Schedule.from_durations`."""
        return super().from_durations(settings, max_lr=max_lr, budget=budget, **extra)

    def phases(self) -> list[tuple[str, float]]:
        """Return the phases: warmup, stable, decay and floor."""
        corners = [("stable", self.horizon - self.decay), ("decay", self.horizon)]
        return [("warmup", self.warmup), *corners, ("floor", math.inf)]

    def after_warmup(self, samples: float) -> float:
        """Return max_lr until `horizon - decay`, then the `decay_style` curve at the elapsed share q of the decay."""
        start = self.horizon - self.decay
        if samples <= start:
            return self.max_lr
        # At the horizon, q may miss 1 by a rounding error if the decay is fractional.
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
"""Schedule classes by the style name in their saved state."""


def from_state(state: dict[str, Any]) -> Schedule:
    """Return the schedule with this `state_dict`.

    Raises:
        ValueError: the style is unknown.
    """
    if state.get("style") not in STYLES:
        raise ValueError(f"{state.get('style')!r} is not a known schedule; available: {', '.join(STYLES)}")
    values = {name: value for name, value in state.items() if name != "style"}
    values["evaluate_at"] = EvaluateAt(values["evaluate_at"])
    if "decay_style" in values:
        values["decay_style"] = DecayStyle(values["decay_style"])
    if (curve := values["weight_decay_curve"]) is not None:
        values["weight_decay_curve"] = WeightDecay(**{**curve, "style": IncrementStyle(curve["style"])})
    if (warmup := values.get("momentum_warmup")) is not None:
        values["momentum_warmup"] = MomentumWarmup(**warmup)
    return STYLES[state["style"]](**values)


def _to_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _to_plain(item) for name, item in value.items()}
    return value.value if isinstance(value, Enum) else value
