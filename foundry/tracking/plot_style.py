"""Shared style of the figures: colours, frames, panels, axes, curves, and writing of PNG files."""

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from foundry.run_dir.files import replaced_atomically
from foundry.run_dir.outputs import PICTURE_METADATA

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE = "#2563eb"
ORANGE = "#ea580c"
GREEN = "#059669"
GREY = "#6b7280"
RED = "#dc2626"

RAW = "each logged step"
SMOOTHED = "running median"

_PANEL_INCHES = (5.2, 3.9)  # width and height of a panel with its labels
_HEADER_INCHES, _LEFT_INCHES = 1.0, 0.85
_FEW_POINTS = 20  # curves with at most this many points are drawn without smoothing
_MOST_POINTS = 4000  # more points are indistinguishable and take seconds to draw
_SPIKE = 4.0  # multiple of the height of the axis without the spike
_FEW = 50  # with fewer points, a single point is more than 2 % of them


def frame(title: str, x: str | None, y: str, *, below: str = "") -> "tuple[Figure, Axes]":
    """Return a figure with one panel.

    Args:
        title: title of the figure.
        x: label of the horizontal axis; None for optimizer steps.
        y: label of the vertical axis.
        below: name of the run, shown under the title.
    """
    figure = blank((8, 5.1), bottom=0.11, top=1 - (_HEADER_INCHES + 0.3) / 5.1)
    head(figure, title, below)
    axes = figure.add_subplot()
    dress(axes)
    axes.set_ylabel(y, parse_math=False)
    if x is None:
        count_steps(axes)
    else:
        axes.set_xlabel(x)
    return figure, axes


def blank(size: tuple[float, float], *, bottom: float, top: float) -> "Figure":
    """Return an empty figure, without the process-wide state of pyplot.

    Args:
        size: width and height in inches.
        bottom: bottom of the panels, as a fraction of the height.
        top: top of the panels, as a fraction of the height.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size)
    figure.subplots_adjust(
        left=0.09, right=0.98, bottom=bottom, top=top
    )  # not a constrained layout, which takes as long as drawing
    FigureCanvasAgg(figure)
    return figure


def panels(count: int) -> "tuple[Figure, list[Axes]]":
    """Return a figure with `count` panels, at most three per row. One, two or four panels are drawn larger."""
    num_columns = count if count <= 3 else (2 if count == 4 else 3)
    num_rows = math.ceil(count / num_columns)
    scale = 1.5 if count == 1 else (1.22 if num_columns == 2 else 1.0)
    width = num_columns * _PANEL_INCHES[0] * scale
    height = num_rows * _PANEL_INCHES[1] * min(scale, 1.15) + _HEADER_INCHES
    figure = blank((width, height), bottom=0.7 / height, top=1 - _HEADER_INCHES / height)
    figure.subplots_adjust(left=_LEFT_INCHES / width, right=1 - 0.3 / width, wspace=0.22, hspace=0.28)
    axes_list = [figure.add_subplot(num_rows, num_columns, number) for number in range(1, count + 1)]
    for axes in axes_list:
        dress(axes)
    return figure, axes_list


def head(figure: "Figure", title: str, below: str = "", *, colour: str = GREY, handles: Sequence[Any] = ()) -> None:
    """Draw the title and a line of text below it at the left, and a legend for all panels at the right.

    Args:
        figure: figure with a margin above its panels.
        title: title of the figure.
        below: one line, such as the name of the run; cut if it is too long for the figure.
        colour: colour of the line `below`.
        handles: legend handles; empty for no legend.
    """
    width, height = figure.get_size_inches()
    left, line = 0.3 / width, 0.3 / height
    max_length = int(11.5 * width)
    text = below if len(below) <= max_length else f"{below[: max_length - 1]}…"
    figure.text(left, 1 - line, title, fontsize=14, fontweight="bold", va="center", parse_math=False)
    figure.text(left, 1 - 1.85 * line, text, color=colour, va="center", parse_math=False)
    if handles:
        figure.legend(
            handles=handles,
            loc="center right",
            bbox_to_anchor=(1 - 0.2 / width, 1 - line),
            ncols=len(handles),
            frameon=False,
            handletextpad=0.4,
            columnspacing=1.2,
        )


def dress(axes: "Axes") -> None:
    """Style the grid and the spines."""
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)


def count_steps(axes: "Axes") -> None:
    """Show optimizer steps along x, as whole, round and short numbers."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: step_text(value)))


def scale_logarithmically(axes: "Axes") -> None:
    """Use a logarithmic y-axis with decimal labels at powers of ten, and at 2 and 5 times these if there is room."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def step_text(step: float) -> str:
    """Format a step for an axis: 500, 20k, 1.5M. No digit is dropped."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**4, "k")):
        if abs(step) >= unit:
            return f"{step / (1000 if name == 'k' else unit):.12g}{name}"
    return f"{step:.12g}"


def legend_above(axes: "Axes") -> None:
    """Place the legend between header and panel, so that it covers no curve. Includes the curves of twin axes."""
    twins = sorted(axes.get_shared_x_axes().get_siblings(axes), key=axes.figure.axes.index)
    handles = [handle for twin in twins for handle in twin.get_legend_handles_labels()[0]]
    if handles:
        axes.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(-0.02, 1.0),
            ncols=3,
            frameon=False,
            handlelength=1.6,
            handletextpad=0.5,
            columnspacing=1.4,
            borderaxespad=0.1,
        )
        for text in axes.get_legend().get_texts():  # type: ignore[union-attr]  # it has just been made
            text.set_parse_math(False)


def draw_series(
    axes: "Axes", points: Sequence[tuple[int, float]], *, colour: str = BLUE, raw: str = RAW, smooth: str = SMOOTHED
) -> None:
    """Draw a noisy curve and its running median.

    Few points are drawn without a median; non-finite values are crosses.

    Args:
        axes: axes of the panel.
        points: (step, value), ascending.
        colour: colour of both lines.
        raw: legend label of the values.
        smooth: legend label of the median.
    """
    steps, values = [step for step, _ in points], [value for _, value in points]
    stride = max(1, math.ceil(len(points) / _MOST_POINTS))
    indices = sorted({*range(0, len(points), stride), len(points) - 1}) if points else []
    x, y = [steps[index] for index in indices], [values[index] for index in indices]
    if len(points) <= _FEW_POINTS:
        axes.plot(x, y, color=colour, linewidth=1.8, marker="o", markersize=3.5, label=raw)
    else:
        axes.plot(x, y, color=colour, alpha=0.3, linewidth=0.8, label=raw)
        inner = [index for index in indices if _reach(len(points), index) >= _half(len(points)) // 4]
        medians = smoothed(values, inner)
        axes.plot([steps[index] for index in inner], medians, color=colour, linewidth=1.8, label=smooth)
    if bad_steps := [step for step, value in points if not math.isfinite(value)]:
        transform = axes.get_xaxis_transform()
        label = f"not finite: {len(bad_steps)}"
        axes.plot(bad_steps, [0.02] * len(bad_steps), "x", color=RED, transform=transform, label=label, clip_on=False)


def smoothed(values: Sequence[float], indices: Sequence[int]) -> list[float]:
    """Return running medians at some indices, over a window of 5 % of the values, at least 5 and at most 201.

    The window shrinks towards both ends of the curve. Single spikes do not change the median, and values that are not
    finite are ignored. The median is NaN if the window has no finite value.
    """
    result = []
    for index in indices:
        reach = _reach(len(values), index)
        window = [value for value in values[index - reach : index + reach + 1] if math.isfinite(value)]
        result.append(median(window) if window else math.nan)
    return result


def _half(count: int) -> int:
    return min(max(count // 40, 2), 100)


def _reach(count: int, index: int) -> int:
    """Return the half width of the window, equal on both sides, since the median would lag at the ends otherwise."""
    return min(_half(count), index, count - 1 - index)


def fit(axes: "Axes", values: Sequence[float], references: Sequence[float] = ()) -> None:
    """Choose y-limits from which a few spikes are excluded, and write how many points lie above the limits.

    With few points, a point counts as a spike only if it is several times as high as the rest.

    Args:
        axes: axes of the panel.
        values: values of a curve in order; the first is always within the limits.
        references: further values that must be within the limits.
    """
    finite = sorted(value for value in values if math.isfinite(value))
    if not finite:
        return
    first = next(value for value in values if math.isfinite(value))
    required = [first, *(value for value in references if math.isfinite(value))]
    typical = finite[int(0.98 * (len(finite) - 1))]
    low, high = min([finite[0], *required]), max([typical, *required])
    is_rare = len(finite) > _FEW or finite[-1] > _SPIKE * abs(high)
    if is_rare and finite[-1] - low > _SPIKE * (high - low) > 0:
        high += 0.5 * (high - low)
        count = sum(value > high for value in finite)
        axes.text(0.01, 0.97, f"{count} above, up to {finite[-1]:.3g}", transform=axes.transAxes, va="top", color=RED)
    else:
        high = max(high, finite[-1])
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    axes.set_ylim(low - margin, high + margin)


def save_figure(figure: "Figure", path: Path) -> None:
    """Write the figure as a PNG, atomically."""
    with replaced_atomically(path) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # missing characters are drawn as boxes
        figure.savefig(file, dpi=120, format="png", metadata=PICTURE_METADATA)
