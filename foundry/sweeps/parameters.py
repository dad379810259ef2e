"""Swept parameters as the figure of a sweep shows them: axis positions, names, and series of jobs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from foundry.config.composition.job_overrides import parse_number
from foundry.sweeps.reading import SweepReport
from foundry.sweeps.seeds import is_seed

_LONGEST_LABEL = 22  # characters


@dataclass(frozen=True)
class Parameter:
    """An override that differs between jobs.

    Attributes:
        name: displayed name.
        positions: position of each job on the axis, by job index: the job's value, or the number of its category.
        labels: names of the categories; empty for numbers.
    """

    name: str
    positions: Mapping[int, float]
    labels: tuple[str, ...]

    @classmethod
    def read(cls, sweep: SweepReport, key: str) -> "Parameter":
        """Return a numeric parameter if every job has a number, else one with categories in the order of the jobs."""
        texts = {job.index: job.values.get(key, "-") for job in sorted(sweep.jobs, key=lambda job: job.index)}
        numbers = {index: parse_number(text) for index, text in texts.items()}
        if all(math.isfinite(number) for number in numbers.values()):
            return cls(sweep.names[key], numbers, ())
        labels = tuple(dict.fromkeys(texts.values()))
        return cls(sweep.names[key], {index: labels.index(text) for index, text in texts.items()}, labels)

    @classmethod
    def read_all(cls, sweep: SweepReport) -> list["Parameter"]:
        """Return the swept parameters.

        Parameters that always vary together, such as zipped ones, are joined into one.

        A parameter without a repeated value, as in a random search, is never joined. A seed is a parameter only if
        nothing else is swept, since jobs that differ only in the seed repeat the same settings.
        """
        groups: dict[tuple[float, ...], list[Parameter]] = {}
        for key in [key for key in sweep.names if not is_seed(key)] or sweep.names:
            parameter = cls.read(sweep, key)
            values = list(parameter.positions.values())
            shape = tuple(values.index(value) for value in values)
            groups.setdefault(shape if len(set(shape)) < len(values) else (len(groups), -1), []).append(parameter)
        return [parameters[0] if len(parameters) == 1 else cls._join(parameters) for parameters in groups.values()]

    @classmethod
    def _join(cls, parameters: Sequence["Parameter"]) -> "Parameter":
        """Join parameters into categories that are named by their combined values."""
        first = parameters[0]
        names = {
            index: ", ".join(item.label(item.positions[index]) for item in parameters) for index in first.positions
        }
        labels = tuple(dict.fromkeys(names.values()))
        positions = {index: float(labels.index(name)) for index, name in names.items()}
        return cls(", ".join(item.name for item in parameters), positions, labels)

    @property
    def values(self) -> list[float]:
        """Distinct axis positions in ascending order."""
        return sorted(set(self.positions.values()))

    @property
    def is_integer(self) -> bool:
        """Whether all values are whole numbers."""
        return not self.labels and all(value.is_integer() for value in self.values)

    def label(self, value: float, max_length: int = _LONGEST_LABEL) -> str:
        """Return the name of an axis position, shortened to `max_length` characters."""
        return shorten(self.labels[int(value)] if self.labels else number_text(value, digits=4), max_length)


def number_text(value: float, digits: int = 6) -> str:
    """Return a number as text, with `digits` significant digits; whole numbers below a million keep all digits."""
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e6 else f"{value:.{digits}g}"


def shorten(text: str, max_length: int) -> str:
    """Shorten a text in its middle, since either its beginning or its end may distinguish it from other texts."""
    if len(text) <= max_length:
        return text
    head = max_length // 2
    tail = max(max_length - 1 - head, 0)
    return f"{text[:head]}…{text[len(text) - tail :]}"


def series_of(parameters: Iterable[Parameter], index: int) -> tuple[float, ...]:
    """Return a job's axis positions for the given parameters; jobs with equal positions form a series."""
    return tuple(parameter.positions[index] for parameter in parameters)


def no_best_reason(sweep: SweepReport) -> str:
    """Return the reason why a sweep has no best job."""
    if not sweep.metric:
        return "no metric to compare jobs by (evaluation.metric is null)"
    if sweep.is_going:
        return f"no job has a {sweep.metric} yet"
    have_finished = any(job.state == "finished" for job in sweep.jobs)
    return f"no job has a finite {sweep.metric}" if have_finished else "no job has finished"


def metric_text(value: float | None) -> str:
    """Format a metric with four decimals, or four significant digits if it is below 0.1 or from 10,000; None as `-`."""
    if value is None:
        return "-"
    return f"{value:.4f}" if 0.1 <= abs(value) < 1e4 else f"{value:.4g}"
