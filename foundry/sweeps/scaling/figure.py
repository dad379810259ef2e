"""Figure of a scaling law: loss over compute with fitted curves and held-out runs, and the error of each run."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from foundry.run_dir.redact import one_line
from foundry.sweeps.scaling.analysis import FORMS, Analysis
from foundry.sweeps.scaling.law import FLOPS_PER_PARAMETER_AND_TOKEN, VARIABLES, Floats
from foundry.sweeps.scaling.runs import Run
from foundry.tracking.humanize import count
from foundry.tracking.plot_style import GREY, ORANGE, head, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_LABELS = 7
_SAME = 1.01
_POINTS = 100
_MARGIN = 1.6
"""Ratio of the end of a curve to the compute of its last run."""


def scaling_figure(analysis: Analysis) -> "Figure":
    """Return the figure of an analysis."""
    figure, (left, right) = panels(2)
    _draw_losses(left, analysis)
    _draw_errors(right, analysis)
    constants = analysis.result.law.constants()
    values = ", ".join(f"{name} = {float(value):.4g}" for name, value in constants.items())
    head(figure, f"{analysis.metric}: {FORMS[analysis.variables]}", one_line(values))
    return figure


def _draw_losses(axes: "Axes", analysis: Analysis) -> None:
    """Draw each run, a curve for each size, the compute-optimal curve, and predictions with their intervals."""
    runs, law = analysis.selection.fitted, analysis.result.law
    flops = [run.flops for run in runs]
    flops += [FLOPS_PER_PARAMETER_AND_TOKEN * item.parameters * item.tokens for item in analysis.predictions]
    grid = np.geomspace(min(flops) / _MARGIN, max(flops) * _MARGIN, _POINTS)
    sizes = _groups(runs)
    colours = _colours(len(sizes))
    labelled = {round(place) for place in np.linspace(0, len(sizes) - 1, min(len(sizes), _MOST_LABELS))}
    for place, (size, members) in enumerate(sizes):
        label = f"N = {count(size)}" if place in labelled else None
        compute = [run.flops for run in members]
        axes.plot(
            compute, [run.loss for run in members], "o", color=colours[place], markersize=6, label=label, zorder=3
        )
        if law.variables != ("N",):
            own = grid[(grid >= min(compute) / _MARGIN**2) & (grid <= max(compute) * _MARGIN**2)]
            tokens = own / (FLOPS_PER_PARAMETER_AND_TOKEN * size)
            points = np.column_stack([_column(variable, size, tokens) for variable in law.variables])
            axes.plot(own, law.loss(points), color=colours[place], linewidth=1.3)
    if law.variables == ("N",):
        constant = float(np.median([run.tokens for run in runs]))
        parameters = grid / (FLOPS_PER_PARAMETER_AND_TOKEN * constant)
        axes.plot(grid, law.loss(parameters[:, None]), color=GREY, linewidth=1.3, label=f"law at D = {count(constant)}")
    if law.variables == VARIABLES:
        best = [float(law.optimum(value)["loss"]) for value in grid]
        if np.isfinite(best).all():
            axes.plot(grid, best, "--", color="black", linewidth=1.1, label="compute-optimal")
    _draw_predictions(axes, analysis)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _label_losses(axes)
    axes.set_xlabel("compute C = 6ND, FLOPs")
    axes.set_ylabel(analysis.metric, parse_math=False)
    axes.legend(frameon=False, fontsize="small", ncols=2)


def _draw_predictions(axes: "Axes", analysis: Analysis) -> None:
    """Draw predictions as hollow squares with intervals, and the measured losses of held-out runs as stars."""
    labels = {"predicted", "held out"}
    for item in analysis.predictions:
        flops = FLOPS_PER_PARAMETER_AND_TOKEN * item.parameters * item.tokens
        if item.interval is not None:
            axes.plot([flops, flops], item.interval, color=ORANGE, linewidth=1.6, zorder=4)
        label = "predicted" if "predicted" in labels else None
        labels.discard("predicted")
        (marker,) = axes.plot(flops, item.loss, "s", color=ORANGE, markersize=7, label=label, zorder=5)
        marker.set_markerfacecolor("white")
        if item.run is not None:
            label = "held out" if "held out" in labels else None
            labels.discard("held out")
            axes.plot(flops, item.run.loss, "*", color=ORANGE, markersize=12, label=label, zorder=6)


def _draw_errors(axes: "Axes", analysis: Analysis) -> None:
    """Draw the difference of measured and fitted loss of each run in percent, over compute."""
    rows = list(analysis.rows())
    sizes = _groups([run for run, _, _ in rows])
    colours = _colours(len(sizes))
    residual_of = {run.job.index: 100 * float(np.expm1(residual)) for run, _, residual in rows}
    for colour, (_, members) in zip(colours, sizes, strict=True):
        values = [residual_of[run.job.index] for run in members]
        axes.plot([run.flops for run in members], values, "o", color=colour, markersize=6)
    for item in analysis.predictions:
        if item.run is not None:
            axes.plot(item.run.flops, 100 * (item.run.loss / item.loss - 1), "*", color=ORANGE, markersize=12)
    axes.axhline(0, color=GREY, linewidth=1)
    axes.set_xscale("log")
    axes.margins(x=0.06, y=0.15)
    axes.set_xlabel("compute C = 6ND, FLOPs")
    axes.set_ylabel("measured over fitted loss, difference in %")


def _label_losses(axes: "Axes") -> None:
    """Label a few round values on a logarithmic axis that may span less than a factor of two."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

    low, high = axes.get_ylim()
    ticks = [tick for tick in MaxNLocator(nbins=6).tick_values(low, high) if low <= tick <= high]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))


def _groups(runs: Sequence[Run]) -> list[tuple[float, list[Run]]]:
    """Return the runs of each N, ascending; numbers that differ by at most 1 % count as one."""
    groups = list[tuple[float, list[Run]]]()
    for run in sorted(runs, key=lambda run: (run.parameters, run.tokens)):
        if groups and run.parameters <= groups[-1][0] * _SAME:
            groups[-1][1].append(run)
        else:
            groups.append((float(run.parameters), [run]))
    return groups


def _colours(number: int) -> list[str]:
    """Return colors from dark to light; the light end of viridis is hard to see."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["viridis"](0.8 * place / max(number - 1, 1))) for place in range(number)]


def _column(variable: str, size: float, tokens: Floats) -> Floats:
    return np.full_like(tokens, size) if variable == "N" else tokens
