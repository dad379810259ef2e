"""Panel of a sweep's figure with the learning curves of all jobs, named at their ends."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from foundry.core.errors import listed
from foundry.sweeps.parameters import Parameter, series_of, shorten
from foundry.sweeps.reading import JobReport, SweepReport, evaluations
from foundry.sweeps.scales import (
    LONGEST_NAME,
    NAME_INCHES,
    Colours,
    Frame,
    is_share_metric,
    name_colours,
    resolve_colour,
    size_inches,
)
from foundry.tracking.plot_style import GREY, RED, count_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_POINTS = 300  # points of a curve
_MOST_NAMES = 20  # names at the ends of curves
_LONGEST_CURVE_NAME = 30  # characters
_LINE_INCHES = 0.155  # height of a name

Curve = tuple[JobReport, list[tuple[int, float]]]


def draw_curves(axes: "Axes", sweep: SweepReport, parameters: Sequence[Parameter]) -> None:
    """Draw the metric of every job over the job's steps; the training loss if no job has two values of the metric."""
    name, curves = _curves(sweep)
    count_steps(axes)
    axes.set_ylabel(shorten(name, LONGEST_NAME), parse_math=False)
    if not curves:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no learning curves", transform=axes.transAxes, ha="center", color=GREY)
        return
    measured = [value for _, points in curves for _, value in points]
    frame = Frame.around(measured, is_linear=name == sweep.metric and is_share_metric(sweep, measured))
    frame.apply(axes)
    colours = Colours(parameters[0]) if parameters else None
    for job, points in reversed(curves):
        steps, values = zip(*points, strict=True)
        is_best, colour = job is sweep.best, _curve_colour(sweep, job, colours)
        (line,) = axes.plot(steps, values, color=colour, linewidth=2.6 if is_best else 1.2, zorder=5 if is_best else 2)
        line.set(linestyle="--" if job.has_failed else "-", marker="o" if len(points) == 1 else "")
        if job.has_failed:
            axes.plot(steps[-1:], values[-1:], "x", color=RED, markersize=7, markeredgewidth=1.8, zorder=4)
    series: dict[tuple[float, ...], list[Curve]] = {}
    for job, points in curves:
        series.setdefault(series_of(parameters, job.index), []).append((job, points))
    texts, title = _curve_names(parameters, [[job for job, _ in alike] for alike in series.values()])
    labels = list(zip((alike[0] for alike in series.values()), texts, strict=True))  # the first job is a series' best
    if len(labels) > _MOST_NAMES:
        labels, title = [(curve, text) for curve, text in labels if curve[0] is sweep.best], ""
        if colours is not None:
            name_colours(axes, colours)
    _write_names(axes, sweep, labels, frame, title, colours)


def _curve_colour(sweep: SweepReport, job: JobReport, colours: Colours | None) -> str:
    """Return the color of a job's value of the first parameter; the best and incomplete jobs have other colors."""
    if colours is not None and job.is_complete and job is not sweep.best:
        return colours.of(job)
    return resolve_colour(sweep, job)


def _curve_names(parameters: Sequence[Parameter], series: Sequence[Sequence[JobReport]]) -> tuple[list[str], str]:
    """Return a name for each series of jobs, and a title above the names.

    A name lists the values of the parameters, and the title the parameters' names. If there are no parameters, or names
    would be too long or equal, a name lists the numbers of the jobs, and the title is empty.
    """
    texts = [", ".join(item.label(item.positions[jobs[0].index]) for item in parameters) for jobs in series]
    if parameters and max(map(len, texts)) <= _LONGEST_CURVE_NAME and len(set(texts)) == len(texts):
        return texts, ", ".join(parameter.name for parameter in parameters)
    return [f"job{'s' * (len(jobs) > 1)} {listed([job.index for job in jobs], 3)}" for jobs in series], ""


def _write_names(
    axes: "Axes",
    sweep: SweepReport,
    labels: Sequence[tuple[Curve, str]],
    frame: Frame,
    title: str,
    colours: Colours | None,
) -> None:
    """Write names to the right of the panel, close to the ends of their curves; the panel becomes narrower.

    Args:
        axes: the panel with the curves.
        sweep: the sweep.
        labels: curves with their names.
        frame: vertical range of the panel.
        title: names of the parameters, shown above the names; empty for none.
        colours: colors of the curves.
    """
    at, (width, height) = axes.get_position(), size_inches(axes)
    room = max((len(text) + 2 for _, text in labels), default=0) * NAME_INCHES / width
    axes.set_position((at.x0, at.y0, at.width * (1 - room), at.height))
    ends = [
        (frame.share(next(value for _, value in reversed(points) if math.isfinite(value))), text, job)
        for (job, points), text in labels
    ]
    ends.sort(key=lambda end: end[0])
    heights = spread([end for end, _, _ in ends], min(_LINE_INCHES / height, 0.95 / max(len(ends), 1)))
    for (_, name, job), place in zip(ends, heights, strict=True):
        text = axes.text(1.02, place, name, transform=axes.transAxes, va="center", fontsize="small", parse_math=False)
        text.set(color=_curve_colour(sweep, job, colours), fontweight="bold" if job is sweep.best else "normal")
    if title:
        above = axes.text(1 / (1 - room), 1.04, shorten(title, 45), transform=axes.transAxes, ha="right")
        above.set(color=GREY, fontsize="small", parse_math=False)


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Move ascending positions by the least sum of squares until neighbors are at least `gap` apart.

    This is isotonic regression of the positions minus multiples of the gap. Positions outside the range from 0 to 0.98
    are then moved into it.
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
    """Return each job with its curve of a metric, except for curves without a finite value."""
    curves = ((job, evaluations(job, metric)) for job in sweep.jobs)
    return [(job, _thin(points)) for job, points in curves if any(math.isfinite(value) for _, value in points)]


def _thin(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return at most 300 evenly spaced points of a curve and the last one; more points would look the same."""
    stride = max(1, math.ceil(len(points) / _MOST_POINTS))
    return [*points[:-1:stride], points[-1]]
