"""The swept parameters of a sweep, as its picture shows them: places along an axis, names, and series of jobs."""

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
        name: as shown.
        at: each job's place along the axis, by index: its value, or the number of its category.
        labels: of the categories; empty for numbers.
    """

    name: str
    at: Mapping[int, float]
    labels: tuple[str, ...]

    @classmethod
    def read(cls, sweep: SweepReport, key: str) -> "Parameter":
        """Numbers where every job has one, else categories in the order in which they were given."""
        texts = {job.index: job.values.get(key, "-") for job in sorted(sweep.jobs, key=lambda job: job.index)}
        numbers = {index: parse_number(text) for index, text in texts.items()}
        if all(math.isfinite(number) for number in numbers.values()):
            return cls(sweep.names[key], numbers, ())
        labels = tuple(dict.fromkeys(texts.values()))
        return cls(sweep.names[key], {index: labels.index(text) for index, text in texts.items()}, labels)

    @classmethod
    def read_all(cls, sweep: SweepReport) -> list["Parameter"]:
        """The swept parameters; those that always go together, as zipped ones do, are one.

        Where no value occurs twice, as in a random search, nothing can be said to go together. A seed is a parameter
        only if nothing else is swept, since its values repeat the settings of other parameters.
        """
        together: dict[tuple[float, ...], list[Parameter]] = {}
        for key in [key for key in sweep.names if not is_seed(key)] or sweep.names:
            parameter = cls.read(sweep, key)
            order = list(parameter.at.values())
            alike = tuple(order.index(place) for place in order)
            together.setdefault(alike if len(set(alike)) < len(order) else (len(together), -1), []).append(parameter)
        return [parameters[0] if len(parameters) == 1 else cls._joined(parameters) for parameters in together.values()]

    @classmethod
    def _joined(cls, parameters: Sequence["Parameter"]) -> "Parameter":
        """Categories, each named by the values that go together."""
        first = parameters[0]
        names = {index: ", ".join(one.label(one.at[index]) for one in parameters) for index in first.at}
        labels = tuple(dict.fromkeys(names.values()))
        places = {index: float(labels.index(name)) for index, name in names.items()}
        return cls(", ".join(one.name for one in parameters), places, labels)

    @property
    def values(self) -> list[float]:
        """The different places, ascending."""
        return sorted(set(self.at.values()))

    @property
    def is_integer(self) -> bool:
        """Whether all values are whole numbers."""
        return not self.labels and all(value.is_integer() for value in self.values)

    def label(self, value: float, longest: int = _LONGEST_LABEL) -> str:
        """A place's name, of at most so many characters."""
        return shorten(self.labels[int(value)] if self.labels else number_text(value, digits=4), longest)


def number_text(value: float, digits: int = 6) -> str:
    """Return a number as text for an axis; whole numbers up to a million have all their digits."""
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e6 else f"{value:.{digits}g}"


def shorten(text: str, longest: int) -> str:
    """Cut a text in its middle, since names often have equal beginnings, and files equal ends."""
    if len(text) <= longest:
        return text
    head = longest // 2
    tail = max(longest - 1 - head, 0)
    return f"{text[:head]}…{text[len(text) - tail :]}"


def series_of(parameters: Iterable[Parameter], index: int) -> tuple[float, ...]:
    """Return a job's places along some of the parameters, by which jobs belong to one series."""
    return tuple(parameter.at[index] for parameter in parameters)
