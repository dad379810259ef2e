"""The panels of a sweep's picture: the metric against a parameter."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low, quantiles
from typing import TYPE_CHECKING

from foundry.config.job_overrides import parse_number
from foundry.sweeps.results import JobReport, SweepReport
from foundry.tracking.plot_style import BLUE, GREEN, GREY, ORANGE, RED, scale_logarithmically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDE_SPAN = 20.0
"""Positive values whose largest is more than this many times the smallest are drawn on a logarithmic axis."""

PRUNED = "#c2a5cf"
"""Of jobs that a search ended early."""

_MOST_TICKS = 7
_ROOM = 36  # characters of all labels, side by side
_LONGEST_LABEL = 22  # characters
_MANY_JOBS = 60  # drawn smaller


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

        Where no value occurs twice, as in a random search, nothing can be said to go together.
        """
        together: dict[tuple[float, ...], list[Parameter]] = {}
        for key in sweep.names:
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

    def label(self, value: float) -> str:
        """A place's name."""
        text = self.labels[int(value)] if self.labels else f"{value:g}"
        return text if len(text) <= _LONGEST_LABEL else f"{text[: _LONGEST_LABEL - 1]}…"


@dataclass(frozen=True)
class Frame:
    """The vertical extent that all panels of the metric share."""

    low: float
    high: float
    is_log: bool

    @classmethod
    def around(cls, values: Iterable[float]) -> "Frame":
        """Hold the values; of those far above or below the bulk only that they lie outside."""
        finite = sorted(value for value in values if math.isfinite(value))
        low, high = finite[0], finite[-1]
        is_log = low > 0 and high > WIDE_SPAN * low
        if is_log:
            margin = (high / low) ** 0.09
            return cls(low / margin, high * margin, True)
        if len(finite) >= 5:
            first, _, third = quantiles(finite, n=4)
            reach = 4 * (third - first) or math.inf
            low, high = max(low, first - reach), min(high, third + reach)
        margin = 0.09 * (high - low) or 0.05 * abs(high) or 0.5
        return cls(low - margin, high + margin, False)

    def apply(self, axes: "Axes") -> None:
        """Give a panel this extent."""
        if self.is_log:
            scale_logarithmically(axes)
        axes.set_ylim(self.low, self.high)


def resolve_colour(sweep: SweepReport, job: JobReport) -> str:
    """A job's colour: of the best, or of its state."""
    if job is sweep.best:
        return ORANGE
    if job.has_failed:
        return RED
    if job.is_pruned:
        return PRUNED
    return BLUE if job.is_complete and job.has_metric else GREEN if job.is_going else GREY


def draw_parameter(axes: "Axes", sweep: SweepReport, parameter: Parameter, frame: Frame) -> None:
    """The metric of each job against a parameter; what failed or diverged is a cross at the bad end."""
    axes.set_xlabel(parameter.name, parse_math=False)
    axes.set_ylabel(sweep.metric_name, parse_math=False)
    frame.apply(axes)
    place = _scale_categories(axes, parameter) if parameter.labels else _scale_numbers(axes, parameter)
    edge = 0.965 if sweep.minimize else 0.035
    transform = axes.get_xaxis_transform()
    for job in reversed(sweep.jobs):  # the best on top
        if job.has_failed or job.has_diverged:
            colour = RED if job.has_failed else GREY
            axes.plot(place(job), edge, "x", color=colour, transform=transform, markersize=7, markeredgewidth=1.8)
        elif job.has_metric:
            _draw_job(axes, place(job), sweep, job, frame)


def _draw_job(axes: "Axes", x: float, sweep: SweepReport, job: JobReport, frame: Frame) -> None:
    """A star for the best, a dot for another, a triangle where the frame ends; hollow until the job is complete.

    The line behind it is the interval of the metric, where there is one.
    """
    assert job.metric is not None
    y = min(max(job.metric, frame.low), frame.high)
    is_best = job is sweep.best
    colour = resolve_colour(sweep, job)
    if job.interval is not None:
        axes.plot([x, x], job.interval, color=colour, linewidth=1.4, alpha=0.45, zorder=1)
    axes.plot(
        x,
        y,
        marker=("*" if is_best else "o") if y == job.metric else ("^" if y < job.metric else "v"),
        markersize=15 if is_best else 7.5 if len(sweep.jobs) <= _MANY_JOBS else 4.5,
        color=colour,
        markerfacecolor=colour if job.is_complete else "white",
        markeredgecolor="white" if job.is_complete else colour,
        zorder=5 if is_best else 3,
        clip_on=False,
    )


def _scale_numbers(axes: "Axes", parameter: Parameter) -> Callable[[JobReport], float]:
    """Set the axis, logarithmic over a wide span unless the values lie evenly but for a small one."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    values = parameter.values
    is_wide = values[0] > 0 and values[-1] > WIDE_SPAN * values[0]
    axes.margins(x=0.06)
    if is_wide and median_low(values) < 0.35 * values[-1]:
        axes.set_xscale("log")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    if len(values) <= _MOST_TICKS and axes.get_xscale() == "log":
        axes.set_xticks(values, [parameter.label(value) for value in values])
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    return lambda job: parameter.at[job.index]


def _scale_categories(axes: "Axes", parameter: Parameter) -> Callable[[JobReport], float]:
    """Set the names below the strips, aslant where they are long; a job's place is among those of its category."""
    names = [parameter.label(value) for value in range(len(parameter.labels))]
    axes.set_xticks(range(len(names)), names)
    if sum(map(len, names)) > _ROOM:
        axes.tick_params(axis="x", rotation=25)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.grid(axis="x", visible=False)
    offsets = dict[int, float]()
    for value in range(len(names)):
        alike = sorted(index for index, at in parameter.at.items() if at == value)
        step = min(0.1, 0.44 / max(len(alike) - 1, 1))
        offsets |= {index: step * (place - (len(alike) - 1) / 2) for place, index in enumerate(alike)}
    return lambda job: parameter.at[job.index] + offsets[job.index]
