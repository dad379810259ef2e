"""Figure of a sweep (report.png): the metric against each swept parameter, and the learning curves of all jobs."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import fmean, median_low, stdev
from typing import TYPE_CHECKING

from foundry.sweeps.curves import draw_curves
from foundry.sweeps.parameters import Parameter, metric_text, no_best_reason, number_text, series_of, shorten
from foundry.sweeps.reading import JobReport, SweepReport
from foundry.sweeps.scales import (
    LONGEST_CATEGORY,
    LONGEST_NAME,
    NAME_INCHES,
    PAUSED,
    PRUNED,
    WIDE_SPAN,
    Colours,
    Frame,
    are_fractions,
    is_share_metric,
    name_colours,
    resolve_colour,
    size_inches,
)
from foundry.tracking.plot_style import BLUE, GREEN, GREY, ORANGE, RED, head, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

_MOST_TICKS = 7  # ticks of an axis if each value has one
_MANY_JOBS = 60  # more jobs than these get smaller markers
_SHARE_PARAMETERS = ("dropout", "fraction", "probability", "top_p")
_MOST_PARAMETERS = 8
Panel = Callable[["Axes"], None]


def _draw_parameter(
    axes: "Axes", sweep: SweepReport, parameter: Parameter, parameters: Sequence[Parameter], frame: Frame
) -> None:
    """Draw the metric of each job against a parameter; failed and diverged jobs are crosses at the metric's bad end.

    Colours show the values of the other parameter with the fewest values. On a numeric axis, lines join the jobs with
    equal values of all other parameters. For several seeds, lines join the means, and a vertical line extends one
    standard deviation to either side of a mean.
    """
    axes.set_xlabel(shorten(parameter.name, LONGEST_NAME), parse_math=False)
    axes.set_ylabel(shorten(sweep.metric_name, LONGEST_NAME), parse_math=False)
    frame.apply(axes)
    rest = [item for item in parameters if item is not parameter]
    other = min(rest, key=lambda item: len(item.values), default=None)  # few colours are easy to distinguish
    colours = None if other is None else Colours(other)
    place = _scale_categories(axes, parameter, rest) if parameter.labels else _scale_numbers(axes, parameter)
    edge = 0.965 if sweep.minimize else 0.035
    transform = axes.get_xaxis_transform()
    for job in reversed(sweep.jobs):  # the best job is drawn last, on top of the others
        if job.has_failed or job.has_diverged:
            colour = RED if job.has_failed else GREY
            axes.plot(place(job), edge, "x", color=colour, transform=transform, markersize=7, markeredgewidth=1.8)
        elif job.has_metric:
            _draw_job(axes, place(job), sweep, job, frame, colours)
    _draw_series(axes, place, sweep, parameter, rest, colours)
    if colours is not None:
        name_colours(axes, colours)


def _draw_series(
    axes: "Axes",
    place: Callable[[JobReport], float],
    sweep: SweepReport,
    parameter: Parameter,
    rest: Sequence[Parameter],
    colours: Colours | None,
) -> None:
    """Join the jobs that differ only in a numeric parameter; show mean and standard deviation over several seeds."""
    series: dict[tuple[float, ...], dict[float, list[JobReport]]] = {}
    for job in sweep.jobs:
        if job.is_complete and job.has_metric:
            alike = series.setdefault(series_of(rest, job.index), {})
            alike.setdefault(parameter.positions[job.index], []).append(job)
    if not rest and all(len(jobs) == 1 for by_value in series.values() for jobs in by_value.values()):
        return
    for by_value in series.values():
        colour = BLUE if colours is None else colours.of(next(iter(by_value.values()))[0])
        means = list[tuple[float, float]]()
        for _, jobs in sorted(by_value.items()):
            values, at = [job.metric for job in jobs if job.metric is not None], [place(job) for job in jobs]
            means.append((fmean(at), fmean(values)))
            if len(jobs) > 1:
                _draw_spread(axes, at, values, colour)
        if len(means) > 1 and not parameter.labels:
            axes.plot(*zip(*means, strict=True), color=colour, linewidth=1.4, alpha=0.7, zorder=2, gid="series")


def _draw_spread(axes: "Axes", at: Sequence[float], values: Sequence[float], colour: str) -> None:
    """Draw a dash at the mean of several seeds, and a line of one standard deviation to either side."""
    middle, mean, spread = fmean(at), fmean(values), stdev(values)
    axes.plot([middle] * 2, [mean - spread, mean + spread], color=colour, linewidth=2, alpha=0.8, zorder=2, gid="std")
    axes.plot(middle, mean, "_", color=colour, markersize=14, markeredgewidth=2.4, zorder=4, gid="mean")


def _draw_job(
    axes: "Axes", x: float, sweep: SweepReport, job: JobReport, frame: Frame, colours: Colours | None
) -> None:
    """Draw a job's marker: a star for the best job, a dot for other jobs.

    A job whose metric is out of range gets a triangle, and an incomplete job a hollow marker. A line behind the marker
    shows the interval of the metric, if it has one.
    """
    assert job.metric is not None
    y = min(max(job.metric, frame.low), frame.high)
    is_best = job is sweep.best
    colour = resolve_colour(sweep, job)
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
    """Set the scale and ticks of a numeric axis, and return the function that gives the position of a job on it.

    The axis is logarithmic for a wide span of values, unless they are fractions of a parameter such as `dropout`, or
    half of them exceed 0.35 times the largest. Each value has a tick if values are few and none are close together.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    values = parameter.values
    is_wide = values[0] > 0 and values[-1] > WIDE_SPAN * values[0]
    is_share = any(word in parameter.name for word in _SHARE_PARAMETERS) and are_fractions(values)
    is_log = is_wide and median_low(values) < 0.35 * values[-1] and not is_share
    if is_log:
        axes.set_xscale("log")
    axes.margins(x=0.06)
    gaps = [other - one for one, other in itertools.pairwise(math.log(value) if is_log else value for value in values)]
    if _MOST_TICKS * min(gaps, default=0.0) >= sum(gaps):
        axes.xaxis.set_major_locator(FixedLocator(values))
    elif is_log:
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if values[-1] >= 100 * values[0] else (1.0, 2.0, 5.0)))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=parameter.is_integer, min_n_ticks=1))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number_text(value)))
    return lambda job: parameter.positions[job.index]


def _scale_categories(axes: "Axes", parameter: Parameter, rest: Sequence[Parameter]) -> Callable[[JobReport], float]:
    """Set the category names of an axis, at an angle and shortened if the full names do not fit side by side.

    The returned function gives the position of a job. Jobs of a category are placed side by side, sorted by the other
    parameters.
    """
    names = parameter.labels
    if (max(map(len, names)) + 2) * len(names) <= size_inches(axes)[0] / NAME_INCHES:
        axes.set_xticks(range(len(names)), names)
    else:
        labels = [shorten(name, LONGEST_CATEGORY) for name in names]
        axes.set_xticks(range(len(names)), labels, rotation=25, ha="right", rotation_mode="anchor")
        axes.xaxis.labelpad = 0
    for text in axes.get_xticklabels():
        text.set_parse_math(False)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.grid(axis="x", visible=False)
    offsets = dict[int, float]()
    for value in range(len(names)):
        alike = [index for index, at in parameter.positions.items() if at == value]
        alike.sort(key=lambda index: (series_of(rest, index), index))
        step = min(0.1, 0.44 / max(len(alike) - 1, 1))
        offsets |= {index: step * (place - (len(alike) - 1) / 2) for place, index in enumerate(alike)}
    return lambda job: parameter.positions[job.index] + offsets[job.index]


def sweep_figure(sweep: SweepReport) -> "Figure":
    """Return the figure of a sweep: a panel for each parameter (at most eight), and one for the learning curves."""
    parameters = Parameter.read_all(sweep)
    drawings: list[Panel] = [
        *_parameter_panels(sweep, parameters),
        partial(draw_curves, sweep=sweep, parameters=parameters),
    ]
    figure, found = panels(len(drawings))
    for axes, draw in zip(found, drawings, strict=True):
        draw(axes)
    _write_head(figure, sweep)
    return figure


def _parameter_panels(sweep: SweepReport, parameters: Sequence[Parameter]) -> Iterator[Panel]:
    measured = [job for job in sweep.jobs if job.has_metric and not job.has_failed]
    if not measured:
        return
    whole = [job for job in measured if job.is_complete] or measured
    values = [value for job in whole for value in (job.metric, *(job.interval or ())) if value is not None]
    frame = Frame.around(values, is_linear=is_share_metric(sweep, values))
    for parameter in parameters[:_MOST_PARAMETERS]:
        yield partial(_draw_parameter, sweep=sweep, parameter=parameter, parameters=parameters, frame=frame)


def _write_head(figure: "Figure", sweep: SweepReport) -> None:
    """Write title and best job at the left, and the legend of the markers at the right."""
    best, number = sweep.best, len(sweep.jobs)
    title, handles = f"{sweep.metric_name} of {number} job{'s' * (number != 1)}", list(_handles(sweep))
    if best is None:
        head(figure, title, no_best_reason(sweep), handles=handles)
        return
    settled = "best" if best.is_complete else "best so far"
    message = [f"{settled}: job {best.index}", metric_text(best.metric), sweep.settings(best)]
    head(figure, title, "   ".join(part for part in message if part), colour=ORANGE, handles=handles)


def _handles(sweep: SweepReport) -> Iterator["Line2D"]:
    from matplotlib.lines import Line2D

    jobs, counts = sweep.jobs, sweep.counts
    if sweep.best is not None:
        yield Line2D([], [], linestyle="", marker="*", color=ORANGE, markersize=13, label="best")
    for number, label, marker, colour, is_filled in (
        (sum(job.is_complete and not job.has_diverged for job in jobs), "finished", "o", BLUE, True),
        (sum(job.has_diverged for job in jobs), "diverged", "x", GREY, True),
        (sum(job.is_pruned for job in jobs), "pruned", "o", PRUNED, False),
        (counts.get("running", 0), "running", "o", GREEN, False),
        (counts.get("paused", 0), "paused", "o", PAUSED, False),
        (counts.get("queued", 0) + counts.get("requeued", 0), "queued", "o", "#d1d5db", False),
        (counts.get("stopped", 0), "stopped", "o", GREY, False),
        (counts.get("failed", 0) + counts.get("lost", 0), "failed", "x", RED, True),
    ):
        if number:
            handle = Line2D(
                [], [], linestyle="", marker=marker, color=colour, markersize=7.5, label=f"{number} {label}"
            )
            handle.set_markerfacecolor(colour if is_filled else "white")
            yield handle
