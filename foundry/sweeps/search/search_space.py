"""Conversion of swept overrides to an Optuna search space, and of its points to jobs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from foundry.core.errors import ConfigError, Violation
from foundry.sweeps.grid import count_values, format_override
from foundry.sweeps.job import Job

_DIGITS = 4


@dataclass(frozen=True)
class Dimension:
    """A searched key with the distribution of its values."""

    key: str
    distribution: BaseDistribution

    def override(self, value: Any) -> str:
        """Return the override that sets the key to a value; floats without a step are rounded to a few digits."""
        if isinstance(self.distribution, FloatDistribution):
            low, high = self.distribution.low, self.distribution.high
            if self.distribution.log:
                value = float(f"{value:.{_DIGITS}g}")
            elif self.distribution.step is None and high > low:
                value = round(value, _DIGITS - math.floor(math.log10(high - low)))
            value = min(max(value, low), high)
        return f"{self.key}={value}"

    @property
    def extremes(self) -> list[Any]:
        """All choices, or the lowest and highest value."""
        if isinstance(self.distribution, CategoricalDistribution):
            return list(self.distribution.choices)
        assert isinstance(self.distribution, (FloatDistribution, IntDistribution))
        return [self.distribution.low, self.distribution.high]


@dataclass(frozen=True)
class Space:
    """Searched dimensions, and the overrides that all jobs share."""

    fixed: tuple[str, ...]
    dimensions: tuple[Dimension, ...]

    @classmethod
    def parse(cls, overrides: Sequence[Override]) -> "Space":
        """Build the space from the overrides of a search; the last one for a key takes effect.

        Raises:
            ConfigError: with all errors in the overrides.
        """
        by_key = {override.get_key_element(): override for override in overrides}
        fixed = tuple(format_override(override) for override in by_key.values() if not override.is_sweep_override())
        dimensions, violations = list[Dimension](), list[Violation]()
        for key, override in by_key.items():
            if override.is_sweep_override():
                try:
                    dimensions.append(Dimension(key, _distribution(override)))
                except ValueError as error:
                    violations.append(Violation(key, f"is {override.get_value_string()}: {error}"))
        if not dimensions and not violations:
            message = "has no key to search; set one, such as hparams.lr='tag(log,interval(1e-4,1e-2))'"
            violations.append(Violation("hydra.sweeper.params", message))
        if violations:
            raise ConfigError(violations)
        return cls(fixed, tuple(dimensions))

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """Distributions by key, for Optuna."""
        return {dimension.key: dimension.distribution for dimension in self.dimensions}

    def job(self, values: Mapping[str, Any]) -> Job:
        """Return the job whose searched keys have these values."""
        swept = tuple(dimension.override(values[dimension.key]) for dimension in self.dimensions)
        return Job(overrides=(*self.fixed, *swept), swept=swept)

    def contains(self, values: Mapping[str, Any]) -> bool:
        """Return whether there is a value for each searched key, as in every trial that has been proposed."""
        return all(dimension.key in values for dimension in self.dimensions)

    def corners(self, values: Mapping[str, Any]) -> Iterator[Job]:
        """Yield the job at a point, and the jobs that differ from it in one key, set to each extreme of that key."""
        yield self.job(values)
        for dimension in self.dimensions:
            yield from (self.job({**values, dimension.key: extreme}) for extreme in dimension.extremes)


def _distribution(override: Override) -> BaseDistribution:
    """Return the Optuna distribution of a key's values.

    Raises:
        ValueError: if the values have an unsupported tag, or Optuna has no matching distribution.
    """
    value = override.value()
    tags: set[str] = getattr(value, "tags", set())
    is_number = isinstance(value, (IntervalSweep, RangeSweep))
    if unknown := tags - ({"log"} if is_number else set()):
        raise ValueError(f"the tag {min(unknown)} is not supported here{'; use log' if is_number else ''}")
    if isinstance(value, IntervalSweep):
        assert value.start is not None
        assert value.end is not None
        if isinstance(value.start, int) and isinstance(value.end, int):
            return IntDistribution(value.start, value.end, log="log" in tags)
        return FloatDistribution(value.start, value.end, log="log" in tags)
    if isinstance(value, RangeSweep):
        return _range_distribution(override, value, is_log="log" in tags)
    return CategoricalDistribution(list(override.sweep_string_iterator()))


def _range_distribution(override: Override, value: RangeSweep, *, is_log: bool) -> BaseDistribution:
    """Return the distribution of a range, without enumerating its numbers.

    Raises:
        ValueError: if the range is empty or infinite, or has a step of 0.
    """
    count = count_values(override)
    start = value.start
    step = value.step
    if count == 0:
        raise ValueError("the range is empty")
    assert start is not None
    if isinstance(start, int) and isinstance(step, int) and isinstance(value.stop, int):
        last = start + (count - 1) * step
        return IntDistribution(min(start, last), max(start, last), log=is_log, step=abs(step))
    end = float(Decimal(start) + (count - 1) * Decimal(step))
    return FloatDistribution(min(start, end), max(start, end), log=is_log, step=None if is_log else abs(step))
