"""Figure of a sweep (report.png): the metric against each swept parameter, and the learning curves of all jobs."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median_low, quantiles, stdev
from typing import TYPE_CHECKING

from foundry.core.errors import listed
from foundry.sweeps.parameters import Parameter, number_text, series_of, shorten
from foundry.sweeps.reading import JobReport, SweepReport, evaluations
from foundry.sweeps.report import metric_text, no_best_reason
from foundry.tracking.plot_style import BLUE, GREEN, GREY, ORANGE, RED, count_steps, head, panels, scale_logarithmically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

_WIDE_SPAN = 20.0
"""Ratio of the largest to the smallest positive value above which an axis is logarithmic."""

_PRUNED = "#c2a5cf"
"""Color of jobs that a search ended early."""

_TICK_INCHES, _LEGEND_INCHES = 0.085, 0.07
"""Estimated width in inches of a character of a tick label, and of a character of a legend row."""

_HUES = (BLUE, "#db2777", "#0d9488", "#7c3aed", "#a16207", "#0891b2", "#475569", "#65a30d")
"""Colors of categories, which exclude the colors of the best job and of states."""
_SCALE, _SCALE_END = "viridis", 0.75  # its end is too light to be seen
_MOST_TICKS = 12
_SHORTEST_TICK = 7  # characters, below which category names are drawn at an angle
_ASLANT = 9  # characters
_LONGEST_NAME = 40  # characters of an axis
_MANY_JOBS = 60  # drawn smaller
_SHARE_METRICS = ("accuracy", "rate", "share", "missing", "success", "match")
_SHARE_PARAMETERS = ("dropout", "fraction", "probability", "top_p")
_MOST_PARAMETERS = 8
_MOST_POINTS = 300  # of a curve
_MOST_NAMES = 20  # at the ends of curves
_LONGEST_CURVE_NAME = 30  # characters
_NAME_INCHES, _LINE_INCHES = 0.072, 0.155  # a character, and a line, of a name

Panel = Callable[["Axes"], None]
Curve = tuple[JobReport, list[tuple[int, float]]]


def _is_share_metric(sweep: SweepReport, values: Iterable[float]) -> bool:
    """Return whether a metric is a fraction between 0 and 1, such as an accuracy, which needs a linear axis.

    A metric between 0 and 1 is a fraction if a higher value is better, or if its name suggests it; other losses are
    not.
    """
    is_named = any(word in sweep.metric for word in _SHARE_METRICS)
    return (is_named or not sweep.minimize) and _are_fractions(values)


def _are_fractions(values: Iterable[float]) -> bool:
    return all(0 <= value <= 1 for value in values if math.isfinite(value))


@dataclass(frozen=True)
class _Colours:
    """Colours of a parameter's values: a scale for numbers, hues for a few categories."""

    parameter: Parameter

    def __getitem__(self, value: float) -> str:
        from matplotlib import colormaps
        from matplotlib.colors import to_hex

        values = self.parameter.values
        rank = values.index(value)
        if self.parameter.labels and len(values) <= len(_HUES):
            return _HUES[rank]
        return to_hex(colormaps[_SCALE](_SCALE_END * rank / max(len(values) - 1, 1)))

    def of(self, job: JobReport) -> str:
        """Return the color of a job."""
        return self[self.parameter.positions[job.index]]


@dataclass(frozen=True)
class Frame:
    """Vertical range that all panels of the metric share."""

    low: float
    high: float
    is_log: bool

    @classmethod
    def around(cls, values: Iterable[float], *, is_linear: bool = False) -> "Frame":
        """Return a range that contains the values, except for extreme outliers on a linear axis.

        Args:
            values: at least one is finite; NaN and infinities are ignored.
            is_linear: never choose a logarithmic axis.
        """
        finite = sorted(value for value in values if math.isfinite(value))
        low, high = finite[0], finite[-1]
        is_log = not is_linear and low > 0 and high > _WIDE_SPAN * low
        if is_log:
            margin = (high / low) ** 0.09
            return cls(low / margin, high * margin, True)
        if len(finite) >= 5:
            first, _, third = quantiles(finite, n=4)
            reach = 4 * (third - first) or math.inf
            low, high = max(low, first - reach), min(high, third + reach)
        margin = 0.09 * (high - low) or 0.05 * abs(high) or 0.5
        return cls(low - margin, high + margin, False)

    def share(self, value: float) -> float:
        """Return the height of a value in the panel, from 0 to 1."""
        low, high = (math.log(self.low), math.log(self.high)) if self.is_log else (self.low, self.high)
        place = math.log(value) if self.is_log else value
        return min(max((place - low) / (high - low), 0.0), 1.0)

    def apply(self, axes: "Axes") -> None:
        """Apply this range to a panel."""
        if self.is_log:
            scale_logarithmically(axes)
        axes.set_ylim(self.low, self.high)


def _size_inches(axes: "Axes") -> tuple[float, float]:
    """Return width and height of a panel without its labels."""
    return axes.bbox.width / axes.figure.dpi, axes.bbox.height / axes.figure.dpi


def _resolve_colour(sweep: SweepReport, job: JobReport) -> str:
    """Return the color of a job: that of the best job, or of its state."""
    if job is sweep.best:
        return ORANGE
    if job.has_failed:
        return RED
    if job.is_pruned:
        return _PRUNED
    return BLUE if job.is_complete and job.has_metric else GREEN if job.is_going else GREY


def _draw_parameter(
    axes: "Axes", sweep: SweepReport, parameter: Parameter, parameters: Sequence[Parameter], frame: Frame
) -> None:
    """Draw the metric of each job against a parameter; failed and diverged jobs are crosses at the bad end.

    Colours show the values of another parameter. Lines join the jobs with equal values of all other parameters; for
    several seeds they join the means, and a vertical line is one standard deviation to either side.
    """
    axes.set_xlabel(shorten(parameter.name, _LONGEST_NAME), parse_math=False)
    axes.set_ylabel(shorten(sweep.metric_name, _LONGEST_NAME), parse_math=False)
    frame.apply(axes)
    grouping = [item for item in parameters if item is not parameter]
    hue = min(grouping, key=lambda item: len(item.values), default=None)  # few colours are easy to distinguish
    colours = None if hue is None else _Colours(hue)
    x_of = _scale_categories(axes, parameter, grouping) if parameter.labels else _scale_numbers(axes, parameter)
    edge = 0.965 if sweep.minimize else 0.035
    transform = axes.get_xaxis_transform()
    for job in reversed(sweep.jobs):  # the best on top
        if job.has_failed or job.has_diverged:
            colour = RED if job.has_failed else GREY
            axes.plot(x_of(job), edge, "x", color=colour, transform=transform, markersize=7, markeredgewidth=1.8)
        elif job.has_metric:
            _draw_job(axes, x_of(job), sweep, job, frame, colours)
    _draw_series(axes, x_of, sweep, parameter, grouping, colours)
    if colours is not None:
        _name_colours(axes, colours)


def _draw_series(
    axes: "Axes",
    x_of: Callable[[JobReport], float],
    sweep: SweepReport,
    parameter: Parameter,
    grouping: Sequence[Parameter],
    colours: _Colours | None,
) -> None:
    """Connect the jobs that differ only in the parameter, and show mean and standard deviation over several seeds."""
    series: dict[tuple[float, ...], dict[float, list[JobReport]]] = {}
    for job in sweep.jobs:
        if job.is_complete and job.has_metric:
            jobs_by_value = series.setdefault(series_of(grouping, job.index), {})
            jobs_by_value.setdefault(parameter.positions[job.index], []).append(job)
    if not grouping and all(len(jobs) == 1 for by_value in series.values() for jobs in by_value.values()):
        return
    for by_value in series.values():
        colour = BLUE if colours is None else colours.of(next(iter(by_value.values()))[0])
        means = list[tuple[float, float]]()
        for _, jobs in sorted(by_value.items()):
            values, x = [job.metric for job in jobs if job.metric is not None], [x_of(job) for job in jobs]
            means.append((fmean(x), fmean(values)))
            if len(jobs) > 1:
                _draw_spread(axes, x, values, colour)
        if len(means) > 1 and not parameter.labels:
            axes.plot(*zip(*means, strict=True), color=colour, linewidth=1.4, alpha=0.7, zorder=2, gid="series")


def _draw_spread(axes: "Axes", x: Sequence[float], values: Sequence[float], colour: str) -> None:
    """Draw a dash at the mean of several seeds, and a line of one standard deviation to either side."""
    middle, mean, spread = fmean(x), fmean(values), stdev(values)
    axes.plot([middle] * 2, [mean - spread, mean + spread], color=colour, linewidth=2, alpha=0.8, zorder=2, gid="std")
    axes.plot(middle, mean, "_", color=colour, markersize=14, markeredgewidth=2.4, zorder=4, gid="mean")


def _name_colours(axes: "Axes", colours: _Colours) -> None:
    """Draw a legend row above the panel: name of the colored parameter, and as many of its values as fit."""
    from matplotlib.lines import Line2D

    parameter = colours.parameter
    values, name = parameter.values, shorten(parameter.name, 22)
    room = _size_inches(axes)[0] / _LEGEND_INCHES - len(name) - 2
    lengths = sorted((len(parameter.label(value)) + 3.5 for value in values), reverse=True)  # with mark and gap
    number = max((n for n in range(2, len(values) + 1) if sum(lengths[:n]) <= room), default=2)
    ranks = sorted({round(index * (len(values) - 1) / (number - 1)) for index in range(number)})
    handles = [Line2D([], [], linestyle="", label=name)]
    handles += [
        Line2D([], [], linestyle="", marker="o", markersize=6, color=colours[values[rank]], label=label)
        for rank in ranks
        for label in [parameter.label(values[rank])]
    ]
    legend = axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(-0.06, 0.99),
        ncols=len(handles),
        frameon=False,
        fontsize="small",
        handlelength=0.8,
        handletextpad=0.4,
        columnspacing=0.9,
        borderaxespad=0.1,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    if len(ranks) < len(values):
        legend.get_texts()[0].set_text(f"{name} ({len(values)} values)")


def _draw_job(
    axes: "Axes", x: float, sweep: SweepReport, job: JobReport, frame: Frame, colours: _Colours | None
) -> None:
    """Draw a job's marker: a star for the best job, a dot for other jobs.

    A job whose metric is out of range gets a triangle, and an incomplete job a hollow marker. A line behind the marker
    shows the interval of the metric, if it has one.
    """
    assert job.metric is not None
    y = min(max(job.metric, frame.low), frame.high)
    is_best = job is sweep.best
    colour = _resolve_colour(sweep, job)
    if colours is not None and job.is_complete and not is_best:
        colour = colours.of(job)
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
    """Set a numeric axis; it is logarithmic for a wide span of values.

    It stays linear for fractions, and if all values except the smallest are evenly spaced. If there are few values,
    each has a tick, except those whose labels would overlap.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    values = parameter.values
    is_wide = values[0] > 0 and values[-1] > _WIDE_SPAN * values[0]
    is_share = any(word in parameter.name for word in _SHARE_PARAMETERS) and _are_fractions(values)
    is_log = is_wide and median_low(values) < 0.35 * values[-1] and not is_share
    if is_log:
        axes.set_xscale("log")
    axes.margins(x=0.06)
    if len(values) <= _MOST_TICKS:
        inches = 0.88 * _size_inches(axes)[0]
        axes.xaxis.set_major_locator(FixedLocator(_tick_values(parameter, is_log=is_log, inches=inches)))
    elif is_log:
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if values[-1] >= 100 * values[0] else (1.0, 2.0, 5.0)))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=parameter.is_integer, min_n_ticks=1))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number_text(value)))
    return lambda job: parameter.positions[job.index]


def _tick_values(parameter: Parameter, *, is_log: bool, inches: float) -> list[float]:
    """Return the values whose labels do not overlap on an axis of this length, always with the first and the last."""
    values = parameter.values
    scaled = [math.log(value) if is_log else value for value in values]
    extent = scaled[-1] - scaled[0] or 1.0
    labels: list[tuple[float, float, float]] = []  # value, left and right end of its label in inches
    for value, position in zip(values, scaled, strict=True):
        middle, half = (position - scaled[0]) / extent * inches, 0.5 * _TICK_INCHES * (len(number_text(value)) + 1)
        label = (value, middle - half, middle + half)
        if value == values[-1]:
            while len(labels) > 1 and labels[-1][2] > label[1]:
                labels.pop()
        if not labels or labels[-1][2] <= label[1]:
            labels.append(label)
    return [value for value, _, _ in labels]


def _scale_categories(
    axes: "Axes", parameter: Parameter, grouping: Sequence[Parameter]
) -> Callable[[JobReport], float]:
    """Set the category names, on two lines or at an angle if they are long.

    Jobs of a category are placed side by side, sorted by the other parameters.
    """
    names = parameter.labels
    slot = _size_inches(axes)[0] / (len(names) + 0.2) / _TICK_INCHES
    axes.set_xticks(range(len(names)))
    if max(map(len, names)) <= slot - 1 or slot >= _SHORTEST_TICK:
        axes.set_xticklabels([_split_lines(name, int(slot) - 1) for name in names])
    else:
        labels = [shorten(name, _ASLANT) for name in names]
        axes.set_xticklabels(labels, rotation=25, ha="right", rotation_mode="anchor")
        axes.xaxis.labelpad = 0
    for text in axes.get_xticklabels():
        text.set_parse_math(False)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.grid(axis="x", visible=False)
    offsets = dict[int, float]()
    for value in range(len(names)):
        indices = [index for index, position in parameter.positions.items() if position == value]
        indices.sort(key=lambda index: (series_of(grouping, index), index))
        step = min(0.1, 0.44 / max(len(indices) - 1, 1))
        offsets |= {index: step * (rank - (len(indices) - 1) / 2) for rank, index in enumerate(indices)}
    return lambda job: parameter.positions[job.index] + offsets[job.index]


def _split_lines(name: str, max_length: int) -> str:
    """Split a category's name into at most two lines of a given length, between words if possible."""
    text = shorten(name, 2 * max_length)
    if len(text) <= max_length:
        return text
    breaks = [index for index in range(len(text) - max_length, max_length + 1) if text[index - 1] in " _-.,=/"]
    index = breaks[-1] if breaks else max_length
    return f"{text[:index].rstrip()}\n{text[index:].lstrip()}"


def sweep_figure(sweep: SweepReport) -> "Figure":
    """Return the figure of a sweep: a panel for each parameter, and one for the learning curves."""
    parameters = Parameter.read_all(sweep)
    drawings: list[Panel] = [
        *_parameter_panels(sweep, parameters),
        partial(_draw_curves, sweep=sweep, parameters=parameters),
    ]
    figure, axes_list = panels(len(drawings))
    for axes, draw in zip(axes_list, drawings, strict=True):
        draw(axes)
    _write_head(figure, sweep)
    return figure


def _parameter_panels(sweep: SweepReport, parameters: Sequence[Parameter]) -> Iterator[Panel]:
    measured = [job for job in sweep.jobs if job.has_metric and not job.has_failed]
    if not measured:
        return
    complete_jobs = [job for job in measured if job.is_complete] or measured
    values = [value for job in complete_jobs for value in (job.metric, *(job.interval or ())) if value is not None]
    frame = Frame.around(values, is_linear=_is_share_metric(sweep, values))
    for parameter in parameters[:_MOST_PARAMETERS]:
        yield partial(_draw_parameter, sweep=sweep, parameter=parameter, parameters=parameters, frame=frame)


def _draw_curves(axes: "Axes", sweep: SweepReport, parameters: Sequence[Parameter]) -> None:
    """Draw the metric of every job over its steps; the training loss if no job has two evaluations."""
    name, curves = _curves(sweep)
    count_steps(axes)
    axes.set_ylabel(shorten(name, 40), parse_math=False)
    if not curves:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no learning curves", transform=axes.transAxes, ha="center", color=GREY)
        return
    measured = [value for _, points in curves for _, value in points]
    is_linear = name == sweep.metric and _is_share_metric(sweep, measured)
    frame = Frame.around(measured, is_linear=is_linear)
    frame.apply(axes)
    colours = _Colours(parameters[0]) if parameters else None
    alpha = 0.9 if len(curves) <= 40 else 0.45
    for job, points in reversed(curves):
        steps, values = zip(*points, strict=True)
        is_best = job is sweep.best
        axes.plot(
            steps,
            values,
            color=_curve_colour(sweep, job, colours),
            linewidth=2.6 if is_best else 1.2,
            alpha=1.0 if is_best else alpha,
            linestyle="--" if job.has_failed else "-",
            marker="o" if len(points) == 1 else None,
            zorder=5 if is_best else 2,
        )
        if job.has_failed:
            axes.plot(steps[-1:], values[-1:], "x", color=RED, markersize=7, markeredgewidth=1.8, zorder=4)
    names, title = _curve_names(sweep, parameters, curves)
    if len(names) > _MOST_NAMES:
        names, title = [name for name in names if name.is_best], ""
        if colours is not None:
            _name_colours(axes, colours)
    _write_names(axes, names, frame, title)


def _curve_colour(sweep: SweepReport, job: JobReport, colours: _Colours | None) -> str:
    """Return the color of the first parameter's value; the best job and incomplete jobs have their own colors."""
    if colours is not None and job.is_complete and job is not sweep.best:
        return colours.of(job)
    return _resolve_colour(sweep, job)


@dataclass(frozen=True)
class _CurveName:
    """Name at the end of a curve, or at the end of the best curve of several seeds."""

    text: str
    end: float
    colour: str
    is_best: bool


def _curve_names(
    sweep: SweepReport, parameters: Sequence[Parameter], curves: Sequence[Curve]
) -> tuple[list[_CurveName], str]:
    """Return a name for each series of curves, and the title of the names.

    A name is the values of the parameters, under the parameters' names, or the job's number if these are too long.
    """
    series: dict[tuple[float, ...], list[Curve]] = {}
    for job, points in curves:
        series.setdefault(series_of(parameters, job.index), []).append((job, points))
    texts = {key: ", ".join(item.label(value) for item, value in zip(parameters, key, strict=True)) for key in series}
    title = ", ".join(parameter.name for parameter in parameters)
    if not title or max(map(len, texts.values())) > _LONGEST_CURVE_NAME or len(set(texts.values())) < len(texts):
        title = ""
        numbers = {key: [job.index for job, _ in group] for key, group in series.items()}
        texts = {key: f"job{'s' * (len(ids) > 1)} {listed(ids, 3)}" for key, ids in numbers.items()}
    colours = _Colours(parameters[0]) if parameters else None
    names = []
    for key, group in series.items():
        job, points = group[0]  # jobs are sorted, the best first
        end = next(value for _, value in reversed(points) if math.isfinite(value))
        names.append(_CurveName(texts[key], end, _curve_colour(sweep, job, colours), job is sweep.best))
    return names, title


def _write_names(axes: "Axes", names: Sequence[_CurveName], frame: Frame, title: str) -> None:
    """Write names to the right of the panel, close to the ends of their curves; the panel becomes narrower.

    Args:
        axes: the panel with the curves.
        names: names of the curves.
        frame: vertical range of the panel.
        title: names of the parameters, shown above the names; empty for none.
    """
    box, (width, height) = axes.get_position(), _size_inches(axes)
    room = (max(len(name.text) for name in names) + 2) * _NAME_INCHES / width if names else 0.0
    axes.set_position((box.x0, box.y0, box.width * (1 - room), box.height))
    ordered = sorted(names, key=lambda name: name.end)
    heights = spread([frame.share(name.end) for name in ordered], min(_LINE_INCHES / height, 0.95 / max(len(names), 1)))
    for name, y in zip(ordered, heights, strict=True):
        text = axes.text(1.02, y, name.text, transform=axes.transAxes, va="center", fontsize="small")
        text.set(color=name.colour, fontweight="bold" if name.is_best else "normal", parse_math=False)
    if title:
        right = 1 / (1 - room)
        title_text = axes.text(right, 1.04, shorten(title, 45), transform=axes.transAxes, ha="right", fontsize="small")
        title_text.set(color=GREY, parse_math=False)


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Move ascending positions between 0 and 1 by the least sum of squares until neighbors are `gap` apart.

    This is isotonic regression of the positions minus multiples of the gap. Positions outside the range are moved into
    it.
    """
    pools = list[tuple[float, int]]()  # mean and number
    for index, place in enumerate(places):
        mean, number = place - index * gap, 1
        while pools and pools[-1][0] > mean:
            other, many = pools.pop()
            mean, number = (mean * number + other * many) / (number + many), number + many
        pools.append((mean, number))
    level = [mean for mean, number in pools for _ in range(number)]
    highest = 0.98 - (len(places) - 1) * gap
    return [min(max(mean, 0.0), highest) + index * gap for index, mean in enumerate(level)]


def _curves(sweep: SweepReport) -> tuple[str, list[Curve]]:
    measured = _finite_curves(sweep, sweep.metric)
    if any(len(points) > 1 for _, points in measured):
        return sweep.metric, measured
    return "training loss", _finite_curves(sweep, "loss")


def _finite_curves(sweep: SweepReport, metric: str) -> list[Curve]:
    """Return the curves of a metric that have at least one finite value."""
    curves = ((job, evaluations(job, metric)) for job in sweep.jobs)
    return [(job, _thin(points)) for job, points in curves if any(math.isfinite(value) for _, value in points)]


def _thin(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Reduce a curve to the number of points that can be distinguished, and keep the last one."""
    stride = max(1, math.ceil(len(points) / _MOST_POINTS))
    return [*points[:-1:stride], points[-1]]


def _write_head(figure: "Figure", sweep: SweepReport) -> None:
    """Write title and best job at the left, and the legend of the markers at the right."""
    best, number = sweep.best, len(sweep.jobs)
    title, handles = f"{sweep.metric_name} of {number} job{'s' * (number != 1)}", list(_handles(sweep))
    if best is None:
        head(figure, title, no_best_reason(sweep), handles=handles)
        return
    label = "best" if best.is_complete else "best so far"
    message = [f"{label}: job {best.index}", metric_text(best.metric), sweep.settings(best)]
    head(figure, title, "   ".join(part for part in message if part), colour=ORANGE, handles=handles)


def _handles(sweep: SweepReport) -> Iterator["Line2D"]:
    from matplotlib.lines import Line2D

    def handle(label: str, marker: str, colour: str, size: float, *, is_filled: bool = True) -> Line2D:
        face = colour if is_filled else "white"
        return Line2D(
            [], [], linestyle="", marker=marker, color=colour, markerfacecolor=face, markersize=size, label=label
        )

    jobs, counts = sweep.jobs, sweep.counts
    if sweep.best is not None:
        yield handle("best", "*", ORANGE, 13)
    for number, label, marker, colour, is_filled in (
        (sum(job.is_complete and not job.has_diverged for job in jobs), "finished", "o", BLUE, True),
        (sum(job.has_diverged for job in jobs), "diverged", "x", GREY, True),
        (sum(job.is_pruned for job in jobs), "pruned", "o", _PRUNED, False),
        (counts.get("running", 0), "running", "o", GREEN, False),
        (counts.get("queued", 0) + counts.get("requeued", 0), "queued", "o", "#d1d5db", False),
        (counts.get("stopped", 0), "stopped", "o", GREY, False),
        (counts.get("failed", 0) + counts.get("lost", 0), "failed", "x", RED, True),
    ):
        if number:
            yield handle(f"{number} {label}", marker, colour, 7.5, is_filled=is_filled)
