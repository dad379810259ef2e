"""report.png of a sweep: what the swept parameters do to the metric, and the learning curves of all jobs."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from foundry.core.errors import listed
from foundry.sweeps.panels import (
    PRUNED,
    Colours,
    Frame,
    draw_parameter,
    is_share_metric,
    name_colours,
    resolve_colour,
    size_inches,
)
from foundry.sweeps.parameters import Parameter, series_of, shorten
from foundry.sweeps.reading import evaluations
from foundry.sweeps.results import JobReport, SweepReport
from foundry.sweeps.table import metric_text, why_no_best
from foundry.tracking.plot_style import BLUE, GREEN, GREY, ORANGE, RED, count_steps, head
from foundry.tracking.plot_style import panels as grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

_MOST_PARAMETERS = 8
_MOST_POINTS = 300  # of a curve
_MOST_NAMES = 20  # at the ends of curves
_LONGEST_NAME = 30  # characters
_NAME_INCHES, _LINE_INCHES = 0.072, 0.155  # a character, and a line, of a name

Panel = Callable[["Axes"], None]
Curve = tuple[JobReport, list[tuple[int, float]]]


def sweep_figure(sweep: SweepReport) -> "Figure":
    """A panel for each parameter, and one for the learning curves."""
    parameters = Parameter.read_all(sweep)
    panels: list[Panel] = [
        *_parameter_panels(sweep, parameters),
        partial(_draw_curves, sweep=sweep, parameters=parameters),
    ]
    figure, found = grid(len(panels))
    for axes, draw in zip(found, panels, strict=True):
        draw(axes)
    _head(figure, sweep)
    return figure


def _parameter_panels(sweep: SweepReport, parameters: Sequence[Parameter]) -> Iterator[Panel]:
    measured = [job for job in sweep.jobs if job.has_metric and not job.has_failed]
    if not measured:
        return
    whole = [job for job in measured if job.is_complete] or measured
    values = [value for job in whole for value in (job.metric, *(job.interval or ())) if value is not None]
    frame = Frame.around(values, is_linear=is_share_metric(sweep, values))
    for parameter in parameters[:_MOST_PARAMETERS]:
        yield partial(draw_parameter, sweep=sweep, parameter=parameter, parameters=parameters, frame=frame)


def _draw_curves(axes: "Axes", sweep: SweepReport, parameters: Sequence[Parameter]) -> None:
    """The metric of every job over its steps; the training loss while nothing has been evaluated twice."""
    name, curves = _curves(sweep)
    count_steps(axes)
    axes.set_ylabel(shorten(name, 40), parse_math=False)
    if not curves:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no learning curves", transform=axes.transAxes, ha="center", color=GREY)
        return
    measured = [value for _, points in curves for _, value in points]
    is_linear = name == sweep.metric and is_share_metric(sweep, measured)
    frame = Frame.around(measured, is_linear=is_linear)
    frame.apply(axes)
    colours = Colours(parameters[0]) if parameters else None
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
            name_colours(axes, colours)
    _write_names(axes, names, frame, title)


def _curve_colour(sweep: SweepReport, job: JobReport, colours: Colours | None) -> str:
    """The colour of the first parameter's value, unless the job is the best or has another state than finished."""
    if colours is not None and job.is_complete and job is not sweep.best:
        return colours.of(job)
    return resolve_colour(sweep, job)


@dataclass(frozen=True)
class _CurveName:
    """Name of a curve, or of the curves of several seeds, at the end of the best one."""

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
    texts = {
        places: ", ".join(one.label(place) for one, place in zip(parameters, places, strict=True)) for places in series
    }
    title = ", ".join(parameter.name for parameter in parameters)
    if not title or max(map(len, texts.values())) > _LONGEST_NAME or len(set(texts.values())) < len(texts):
        title = ""
        numbers = {places: [job.index for job, _ in alike] for places, alike in series.items()}
        texts = {places: f"job{'s' * (len(many) > 1)} {listed(many, 3)}" for places, many in numbers.items()}
    colours = Colours(parameters[0]) if parameters else None
    names = []
    for places, alike in series.items():
        job, points = alike[0]  # jobs are sorted, the best first
        end = next(value for _, value in reversed(points) if math.isfinite(value))
        names.append(_CurveName(texts[places], end, _curve_colour(sweep, job, colours), job is sweep.best))
    return names, title


def _write_names(axes: "Axes", names: Sequence[_CurveName], frame: Frame, title: str) -> None:
    """Write names at the right of the panel, close to the ends of their curves; the panel becomes narrower.

    Args:
        axes: of the curves.
        names: of curves.
        frame: the vertical extent of the panel.
        title: above the names: the parameters whose values they are.
    """
    at, (width, height) = axes.get_position(), size_inches(axes)
    room = (max(len(name.text) for name in names) + 2) * _NAME_INCHES / width if names else 0.0
    axes.set_position((at.x0, at.y0, at.width * (1 - room), at.height))
    ordered = sorted(names, key=lambda name: name.end)
    heights = spread([frame.share(name.end) for name in ordered], min(_LINE_INCHES / height, 0.95 / max(len(names), 1)))
    for name, place in zip(ordered, heights, strict=True):
        text = axes.text(1.02, place, name.text, transform=axes.transAxes, va="center", fontsize="small")
        text.set(color=name.colour, fontweight="bold" if name.is_best else "normal", parse_math=False)
    if title:
        right = 1 / (1 - room)
        above = axes.text(right, 1.04, shorten(title, 45), transform=axes.transAxes, ha="right", fontsize="small")
        above.set(color=GREY, parse_math=False)


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Move ascending places between 0 and 1, as little as possible in squares, until neighbours are `gap` apart.

    This is isotonic regression of the places minus multiples of the gap. Places outside the range are moved into it.
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
    """What was measured of each job, if a number was among it."""
    curves = ((job, evaluations(job, metric)) for job in sweep.jobs)
    return [(job, _thinned(points)) for job, points in curves if any(math.isfinite(value) for _, value in points)]


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """So many that no more can be told apart, the last one among them."""
    stride = max(1, math.ceil(len(points) / _MOST_POINTS))
    return [*points[:-1:stride], points[-1]]


def _head(figure: "Figure", sweep: SweepReport) -> None:
    """Title and best job at the left, what the marks mean at the right."""
    best, number = sweep.best, len(sweep.jobs)
    title, handles = f"{sweep.metric_name} of {number} job{'s' * (number != 1)}", list(_handles(sweep))
    if best is None:
        head(figure, title, why_no_best(sweep), handles=handles)
        return
    settled = "best" if best.is_complete else "best so far"
    message = [f"{settled}: job {best.index}", metric_text(best.metric), sweep.settings(best)]
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
        (sum(job.is_pruned for job in jobs), "pruned", "o", PRUNED, False),
        (counts.get("running", 0), "running", "o", GREEN, False),
        (counts.get("queued", 0) + counts.get("requeued", 0), "queued", "o", "#d1d5db", False),
        (counts.get("stopped", 0), "stopped", "o", GREY, False),
        (counts.get("failed", 0) + counts.get("lost", 0), "failed", "x", RED, True),
    ):
        if number:
            yield handle(f"{number} {label}", marker, colour, 7.5, is_filled=is_filled)
