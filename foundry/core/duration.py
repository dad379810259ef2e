"""Lengths of training: `"1000"` steps, `"0.3 run"`, `"2 epochs"`, `"50k samples"`, `"250M tokens"`.

`Phases` has the lengths of a schedule's phases, converted to samples.
"""

import re
from dataclasses import dataclass, replace
from decimal import Decimal
from enum import Enum
from typing import Self

from foundry.core.batch_sizes import LARGEST_COUNT, BatchSizes
from foundry.core.errors import as_text

_SUFFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
# OmegaConf turns 0.00001 into the text 1e-05.
_PATTERN = re.compile(r"(?P<number>(\d+|\d*\.\d+|\d+\.\d*)(e-\d{1,2})?)(?P<suffix>[kKMBT]?)(?:\s+(?P<unit>[a-z]+))?")
_EPOCH_STEPS = re.compile(r"(?P<count>\d+[kKMBT]?)\s+epoch_steps?")
_FORMS = '"1000" (steps), "0.3 run", "2 epochs", "50k samples" or "250M tokens"'


class Unit(Enum):
    """Unit of a duration."""

    steps = "steps"
    fraction = "fraction"
    run = "run"
    epochs = "epochs"
    samples = "samples"
    tokens = "tokens"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Size of a run; reference for relative durations.

    Attributes:
        total_samples: samples that the run consumes, in whole optimizer steps.
        batch_sizes: samples per optimizer step along the run.
        samples_per_epoch: samples in one pass over the training data.
        tokens_per_sample: tokens in one sample; None if the data has no tokens.
    """

    total_samples: int
    batch_sizes: BatchSizes
    samples_per_epoch: int
    tokens_per_sample: int | None = None

    @property
    def total_steps(self) -> int:
        """Number of optimizer steps in the run."""
        return self.batch_sizes.whole_steps(self.total_samples)


@dataclass(frozen=True)
class Duration:
    """A length in one of six units.

    `1` is one step, `1.0` the whole reference length, which is the run unless another is given, and `1 run` always the
    run.
    """

    value: float
    unit: Unit

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a duration in the user's notation.

        Raises:
            ValueError: the text has another form, is negative, a fraction above 1, a fraction of a step, above
                `LARGEST_COUNT`, or too close to 0.
        """
        match, message = _PATTERN.fullmatch(text.strip()), f"'{as_text(text)}'"
        if match is None:
            raise ValueError(f"{message} is not a duration; write {_FORMS}")
        number = match["number"]
        suffix = match["suffix"]
        unit = match["unit"]
        # Decimal, because 2.01 * 1000 is not an integer in binary floating point.
        exact = Decimal(number) * _SUFFIXES[suffix]
        if exact > LARGEST_COUNT:
            raise ValueError(f"{message} is more than {LARGEST_COUNT:,}; give a smaller number")
        if 0 < exact * LARGEST_COUNT < 1:
            raise ValueError(f"{message} is too close to 0; give a larger number")
        value = float(exact)
        if unit is None:
            if number.isdigit() or suffix:
                if value != int(value):
                    raise ValueError(f"{message} is not a whole number of steps; write {_FORMS}")
                return cls(value, Unit.steps)
            if value > 1:
                raise ValueError(f"{message} has a decimal point, so it is a fraction of the run, which is at most 1.0")
            return cls(value, Unit.fraction)
        if unit == "run":
            if value > 1:
                raise ValueError(f"{message} is longer than the run")
            return cls(value, Unit.run)
        name = unit if unit.endswith("s") else f"{unit}s"
        if name not in ("steps", "epochs", "samples", "tokens"):
            raise ValueError(f"{message} has an unknown unit '{as_text(unit)}'; write {_FORMS}")
        if name == "steps" and value != int(value):
            raise ValueError(f"{message} is not a whole number of steps; write {_FORMS}")
        return cls(value, Unit(name))

    @classmethod
    def parse_positive(cls, text: str) -> Self:
        """Parse a duration that must not be zero.

        Raises:
            ValueError: as in `parse`, or the length is zero.
        """
        duration = cls.parse(text)
        if duration.value == 0:
            raise ValueError(f"is {as_text(text)} but must be above 0")
        return duration

    def samples(self, budget: Budget, *, reference: float | None = None, end: float | None = None) -> float:
        """Return the length in samples; fractions are not rounded.

        Args:
            budget: size of the run.
            reference: reference length of a fraction, in samples; None for the run.
            end: samples consumed at the end of a length in steps; None if the length starts with the run.

        Raises:
            ValueError: the duration counts tokens and the data has no tokens.
        """
        match self.unit:
            case Unit.steps:
                sizes = budget.batch_sizes
                return sizes.samples_after(self.value) if end is None else sizes.samples_before(end, self.value)
            case Unit.fraction:
                return self.value * (budget.total_samples if reference is None else reference)
            case Unit.run:
                return self.value * budget.total_samples
            case Unit.epochs:
                return self.value * budget.samples_per_epoch
            case Unit.samples:
                return self.value
            case Unit.tokens:
                if budget.tokens_per_sample is None:
                    raise ValueError(f"{self} is a length in tokens, but samples of this data have no tokens")
                return self.value / budget.tokens_per_sample

    def times(self, factor: int) -> "Duration":
        """Return a length that is `factor` times as long; it may be longer than the run."""
        return replace(self, value=without_rounding_error(factor * self.value))

    @property
    def text(self) -> str:
        """The duration in the user's notation; a fraction is one of the run."""
        return f"{self.value:.15g} {'run' if self.unit is Unit.fraction else self._noun}"

    def __str__(self) -> str:
        if self.unit is Unit.fraction:
            return f"{self.value} of the run"
        return f"{self.value:g} {self._noun}"

    @property
    def _noun(self) -> str:
        """Name of the unit, in the singular for 1."""
        return self.unit.value.removesuffix("s") if self.value == 1 else self.unit.value


def check_rung(length: Duration, budget: Budget) -> None:
    """Check that the first rung of a search is at least one step long, and before the end of a run of this budget.

    Raises:
        ValueError: it is not, or the duration counts tokens and the data has no tokens.
    """
    samples = length.samples(budget)
    steps = budget.batch_sizes.steps_at(samples)
    if steps < 1:
        raise ValueError(f"is {length.text}, {steps:.2g} of an optimizer step; a rung needs at least one step")
    if samples >= budget.total_samples:
        text = "" if length.unit is Unit.steps else f"{length.text}, "
        total = budget.total_steps
        raise ValueError(
            f"is {text}{steps:g} steps, but the run has only {total}; the first rung must be before its end"
        )


def without_rounding_error(samples: float) -> float:
    """Round a product of a fraction and a count to 15 digits, so that it is an integer if the exact product is one.

    A double holds 15 decimal digits.
    """
    return float(f"{samples:.15g}")


@dataclass(frozen=True)
class Interval:
    """Schedule of a recurring event: every so many optimizer steps, samples or tokens.

    Attributes:
        steps: optimizer steps between events; None if the interval has another unit.
        samples: samples between events, unless `steps` or `tokens` applies; an event is due at the step that reaches a
            multiple.
        tokens: tokens between events, if the run counts its tokens; None if the interval has another unit.
    """

    steps: int | None
    samples: float
    tokens: float | None = None

    @classmethod
    def parse(cls, text: str, budget: Budget) -> Self:
        """Parse a duration as the interval of a run with this budget.

        Raises:
            ValueError: the text is not a duration, is zero, is longer than the run, or counts tokens and the data has
                no tokens.
        """
        duration = Duration.parse_positive(text)
        # 0.07 of 100 samples is 7.000000000000001, which the seventh sample would not reach.
        samples = without_rounding_error(duration.samples(budget))
        if samples > budget.total_samples:
            length = "" if duration.unit is Unit.steps else f"{as_text(text)}, "
            steps = budget.batch_sizes.steps_at(samples)
            raise ValueError(f"is {length}{steps:g} steps, but the run has only {budget.total_steps}")
        return cls(
            steps=int(duration.value) if duration.unit is Unit.steps else None,
            samples=samples,
            tokens=duration.value if duration.unit is Unit.tokens else None,
        )

    def is_reached(self, steps: int, samples: int, tokens: int | None) -> bool:
        """Return whether a run with these counts is at the first event or after it."""
        if self.steps is not None:
            return steps >= self.steps
        if self.tokens is not None and tokens is not None:
            return tokens >= self.tokens
        return samples >= self.samples

    def times_before_end(self, budget: Budget) -> int:
        """Return the maximum number of events before the last step of a run with this budget."""
        last_possible = budget.total_steps - 1
        if self.steps is not None:
            return last_possible // self.steps
        return min(last_possible, int(budget.batch_sizes.samples_after(last_possible) / self.samples))

    def due(self, step: int, samples_before: int, samples_after: int, tokens: tuple[int, int] | None = None) -> bool:
        """Return whether an event is due after optimizer step `step`.

        Args:
            step: number of the step, counted from one.
            samples_before: samples consumed before the step.
            samples_after: samples consumed after the step.
            tokens: tokens consumed before and after the step; None if the data does not count tokens.
        """
        if self.steps is not None:
            return step % self.steps == 0
        if self.tokens is not None and tokens is not None:
            before, after = tokens
            return after // self.tokens > before // self.tokens
        return int(samples_after / self.samples) > int(samples_before / self.samples)


def parse_epoch_steps(text: str) -> int | None:
    """Parse `"10 epoch_steps"`: optimizer steps, counted from the start of each epoch. Return None for any other text.

    Raises:
        ValueError: the number is zero or exceeds `LARGEST_COUNT`.
    """
    match = _EPOCH_STEPS.fullmatch(text.strip())
    return None if match is None else int(Duration.parse_positive(match["count"]).value)


@dataclass(frozen=True, kw_only=True)
class EpochInterval:
    """Schedule of a recurring event that is counted in batches (optimizer steps) from the start of each epoch.

    A batch belongs to the epoch of its first sample. So if an epoch is not an integer number of batches, its last batch
    includes the first samples of the next epoch. If batches grow, later epochs have fewer batches. An interval may be
    longer than the run if the epoch is longer too; then no event is due.

    Attributes:
        every: an integer number of batches, or a fraction of the epoch's batches; at least one batch, at most the
            epoch.
        batch_sizes: samples per optimizer step along the run.
        samples_per_epoch: samples in one pass over the training data.
    """

    every: int | float
    batch_sizes: BatchSizes
    samples_per_epoch: int

    @classmethod
    def of(cls, every: int | float, budget: Budget) -> Self:
        """Return the interval in a run with this budget."""
        return cls(every=every, batch_sizes=budget.batch_sizes, samples_per_epoch=budget.samples_per_epoch)

    def steps_in(self, epoch: int) -> int:
        """Return the number of batches between events in an epoch: at least 1, at most all batches of the epoch.

        Args:
            epoch: number of the epoch, counted from 0.
        """
        batches = self._steps_before(epoch + 1) - self._steps_before(epoch)
        interval = self.every if isinstance(self.every, int) else int(batches * self.every)
        return max(1, min(interval, batches))

    def due(self, step: int, samples_before: int, samples_after: int, tokens: tuple[int, int] | None = None) -> bool:
        """Return whether an event is due after optimizer step `step`; see `Interval.due`, `tokens` has no effect."""
        epoch = samples_before // self.samples_per_epoch
        return (step - self._steps_before(epoch)) % self.steps_in(epoch) == 0

    def _steps_before(self, epoch: int) -> int:
        """Return the number of optimizer steps that begin before the epoch."""
        start = epoch * self.samples_per_epoch
        steps = self.batch_sizes.whole_steps(start)
        return steps + (self.batch_sizes.samples_after(steps) < start)


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Lengths of a schedule's phases in samples; they may be fractional.

    Attributes:
        warmup: length of the linear warmup.
        horizon: samples until the learning rate reaches its floor, warmup included.
        decay: length of the decay that ends at the horizon; None if the schedule has no separate decay phase.
        weight_decay_horizon: samples until the weight decay reaches its final value.
        is_clamped: whether the warmup is shorter than the user set it.
    """

    warmup: float
    horizon: float
    decay: float | None
    weight_decay_horizon: float
    is_clamped: bool = False

    @classmethod
    def resolve(
        cls,
        budget: Budget,
        *,
        warmup: str,
        horizon: str,
        decay: str | None,
        weight_decay_horizon: str | None,
        clamp_warmup: bool = False,
    ) -> Self:
        """Convert durations to samples; fractions of `warmup` and `decay` are relative to the horizon.

        Megatron-LM defines these fractions in the same way. So a run that is shorter than its horizon follows the first
        part of the whole schedule, including the weight decay, whose horizon defaults to the longer of run and horizon.
        A clamped warmup ends before the decay and at least one step before the horizon.

        Raises:
            ValueError: a duration counts tokens and the data has no tokens.
        """
        end = Duration.parse(horizon).samples(budget)
        wd_end = (
            max(end, budget.total_samples)
            if weight_decay_horizon is None
            else Duration.parse(weight_decay_horizon).samples(budget)
        )
        length = Duration.parse(warmup).samples(budget, reference=end)
        decaying = None if decay is None else Duration.parse(decay).samples(budget, reference=end, end=end)
        most = end - max(budget.batch_sizes.samples_before(end, 1), decaying or 0.0)
        is_clamped = clamp_warmup and length > most
        return cls(
            warmup=max(most, 0.0) if is_clamped else length,
            horizon=end,
            decay=decaying,
            weight_decay_horizon=wd_end,
            is_clamped=is_clamped,
        )
