"""The panels of a sweep's picture: the metric against a parameter."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import median, median_low, quantiles
from typing import TYPE_CHECKING

from foundry.sweeps.results import JobReport, SweepReport
from foundry.tracking.plot_style import BLUE, GREEN, GREY, ORANGE, RED, dress

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import LinearSegmentedColormap

WIDE_SPAN = 20.0
"""Positive values whose largest is more than this many times the smallest are drawn on a logarithmic axis."""

PRUNED = "#c2a5cf"
"""Of jobs that a search ended early."""

_PALE = "#cfd9f7"
_MOST_TICKS = 7
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
        numbers = {index: _number(text) for index, text in texts.items()}
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

    def widest_label(self) -> int:
        """Characters of the longest name."""
        return max(len(self.label(value)) for value in self.values)

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
            from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylim(self.low, self.high)


class Palette:
    """The colour of each job: the better, the darker; the best stands out."""

    def __init__(self, sweep: SweepReport) -> None:
        self.best = sweep.best
        ranked = [job.index for job in sweep.jobs if job.is_complete and job.has_metric]
        shades = shading()
        self._shades = {index: shades(place / max(len(ranked) - 1, 1)) for place, index in enumerate(ranked)}

    def colour(self, job: JobReport) -> object:
        """A job's colour, as matplotlib takes it."""
        if job is self.best:
            return ORANGE
        if job.has_failed:
            return RED
        if job.is_pruned:
            return PRUNED
        return self._shades.get(job.index, GREEN if job.is_going else GREY)


def shading() -> "LinearSegmentedColormap":
    """From good to bad."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("good_to_bad", [BLUE, "#7d9df0", _PALE])


def draw_parameter(axes: "Axes", sweep: SweepReport, parameter: Parameter, frame: Frame, palette: Palette) -> None:
    """The metric of each job against a parameter; the best at each value, or the median of each category, as a line."""
    dress(axes)
    axes.set_xlabel(parameter.name)
    axes.set_ylabel(sweep.metric_name)
    frame.apply(axes)
    place = _scale_categories(axes, parameter, sweep) if parameter.labels else _scale_numbers(axes, parameter)
    measured = [job for job in sweep.jobs if job.has_metric and not job.has_failed]
    _draw_trend(axes, sweep, parameter, [job for job in measured if job.is_complete])
    size = 7.5 if len(measured) <= _MANY_JOBS else 4.5
    for job in reversed(measured):  # the best on top
        _draw_job(axes, place(job), job, frame, palette, size)
    edge = 0.965 if sweep.minimize else 0.035  # the bad end
    transform = axes.get_xaxis_transform()
    for job in sweep.jobs:
        if job.has_failed or job.has_diverged:
            colour = RED if job.has_failed else GREY
            axes.plot(
                [place(job)],
                [edge],
                "x",
                color=colour,
                transform=transform,
                markersize=7,
                markeredgewidth=1.8,
                zorder=4,
            )


def _draw_job(axes: "Axes", x: float, job: JobReport, frame: Frame, palette: Palette, size: float) -> None:
    assert job.metric is not None
    y = min(max(job.metric, frame.low), frame.high)
    is_inside = y == job.metric
    is_done = job.is_complete
    is_best = job is palette.best
    axes.plot(
        [x],
        [y],
        marker=("*" if is_best else "o") if is_inside else ("^" if y < job.metric else "v"),
        markersize=15 if is_best else size,
        color=palette.colour(job),
        markerfacecolor=palette.colour(job) if is_done else "white",
        markeredgecolor="white" if is_done else palette.colour(job),
        markeredgewidth=0.1 * size if is_done else 0.2 * size,
        zorder=5 if is_best else 3,
        clip_on=False,
    )


def _draw_trend(axes: "Axes", sweep: SweepReport, parameter: Parameter, jobs: Sequence[JobReport]) -> None:
    ordered = sorted(jobs, key=lambda job: parameter.at[job.index])
    groups = [
        (value, [job.metric for job in group if job.metric is not None])
        for value, group in groupby(ordered, key=lambda job: parameter.at[job.index])
    ]
    if parameter.labels:
        for value, metrics in groups:
            axes.hlines(median(metrics), value - 0.3, value + 0.3, color=GREY, alpha=0.6, linewidth=1.6, zorder=2)
        return
    if len(groups) > len(jobs) / 2 and len(sweep.names) > 1:
        return  # what other parameters did would look like an effect of this one
    best = [(min if sweep.minimize else max)(metrics) for _, metrics in groups]
    axes.plot([value for value, _ in groups], best, color=GREY, alpha=0.45, linewidth=1.2, zorder=2)


def _scale_numbers(axes: "Axes", parameter: Parameter) -> Callable[[JobReport], float]:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    values = parameter.values
    is_wide = values[0] > 0 and values[-1] > WIDE_SPAN * values[0]
    is_log = is_wide and median_low(values) < 0.35 * values[-1]  # else they lie evenly, but for a small one
    axes.margins(x=0.06)
    if is_log:
        axes.set_xscale("log")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    places = [math.log(value) for value in values] if is_log else values
    extent = places[-1] - places[0] or 1.0
    gaps = [(after - before) / extent for before, after in pairwise(places)]
    longest = parameter.widest_label()
    if len(values) <= _MOST_TICKS and min(gaps, default=1.0) > 0.022 * (longest + 1):
        axes.set_xticks(values, [parameter.label(value) for value in values])
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    return lambda job: parameter.at[job.index]


def _scale_categories(axes: "Axes", parameter: Parameter, sweep: SweepReport) -> Callable[[JobReport], float]:
    """Set the names below the strips; a job's place is beside those of its category."""
    names = [parameter.label(value) for value in range(len(parameter.labels))]
    _name_columns(axes, names, room=36)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.grid(axis="x", visible=False)
    offsets = dict[int, float]()
    for value in range(len(names)):
        beside = sorted(index for index, at in parameter.at.items() if at == value)
        step = min(0.1, 0.44 / max(len(beside) - 1, 1))
        offsets |= {index: step * (place - (len(beside) - 1) / 2) for place, index in enumerate(beside)}
    return lambda job: parameter.at[job.index] + offsets[job.index]


def _name_columns(axes: "Axes", names: Sequence[str], *, room: int) -> None:
    """Write the names below the axes, aslant where they have more characters than there is room for."""
    is_long = sum(map(len, names)) > room
    axes.set_xticks(
        range(len(names)),
        names,
        rotation=25 if is_long else 0,
        ha="right" if is_long else "center",
        rotation_mode="anchor",
    )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
