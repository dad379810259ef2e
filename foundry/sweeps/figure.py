"""report.png of a sweep: what the swept parameters do to the metric, and the learning curves of all jobs."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from foundry.sweeps.panels import PRUNED, Frame, Parameter, draw_parameter, resolve_colour
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

Panel = Callable[["Axes"], None]
Curve = tuple[JobReport, list[tuple[int, float]]]


def sweep_figure(sweep: SweepReport) -> "Figure":
    """A panel for each parameter, and one for the learning curves."""
    panels: list[Panel] = [*_parameter_panels(sweep), partial(_draw_curves, sweep=sweep)]
    figure, found = grid(len(panels))
    for axes, draw in zip(found, panels, strict=True):
        draw(axes)
    _head(figure, sweep)
    return figure


def _parameter_panels(sweep: SweepReport) -> Iterator[Panel]:
    measured = [job for job in sweep.jobs if job.has_metric and not job.has_failed]
    if not measured:
        return
    whole = [job for job in measured if job.is_complete] or measured
    frame = Frame.around(value for job in whole for value in (job.metric, *(job.interval or ())) if value is not None)
    for parameter in Parameter.read_all(sweep)[:_MOST_PARAMETERS]:
        yield partial(draw_parameter, sweep=sweep, parameter=parameter, frame=frame)


def _draw_curves(axes: "Axes", sweep: SweepReport) -> None:
    """The metric of every job over its steps; the training loss while nothing has been evaluated twice."""
    name, curves = _curves(sweep)
    count_steps(axes)
    axes.set_ylabel(name, parse_math=False)
    if not curves:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no learning curves", transform=axes.transAxes, ha="center", color=GREY)
        return
    Frame.around(value for _, points in curves for _, value in points).apply(axes)
    alpha = 0.9 if len(curves) <= 40 else 0.45
    for job, points in reversed(curves):
        steps, values = zip(*points, strict=True)
        is_best = job is sweep.best
        axes.plot(
            steps,
            values,
            color=resolve_colour(sweep, job),
            linewidth=2.6 if is_best else 1.2,
            alpha=1.0 if is_best else alpha,
            linestyle="--" if job.has_failed else "-",
            marker="o" if len(points) == 1 else None,
            zorder=5 if is_best else 2,
        )
        if job.has_failed:
            axes.plot(steps[-1:], values[-1:], "x", color=RED, markersize=7, markeredgewidth=1.8, zorder=4)
        if is_best:
            axes.annotate(
                f"job {job.index}",
                (steps[-1], values[-1]),
                xytext=(-2, -7 if sweep.minimize else 7),
                textcoords="offset points",
                ha="right",
                va="top" if sweep.minimize else "bottom",
                color=ORANGE,
                fontweight="bold",
            )


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
