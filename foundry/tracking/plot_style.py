"""What foundry's pictures share: colours, empty frames and panels, axes, curves, and how a file is written."""

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

_PANEL_INCHES = (5.2, 3.9)  # with its labels
_HEADER_INCHES, _LEFT_INCHES = 1.0, 0.85
_FEW_POINTS = 20  # drawn as they are
_MOST_POINTS = 4000  # more cannot be told apart and take seconds to draw
_SPIKE = 4.0  # times the frame without it
_FEW = 50  # points, of which one is more than 2 %


def frame(title: str, x: str | None, y: str, *, below: str = "") -> "tuple[Figure, Axes]":
    """A picture of one panel.

    Args:
        title: what is shown.
        x: what lies along the horizontal axis; None: optimizer steps.
        y: what lies along the vertical one.
        below: of which run, under the title.
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
    """A picture without pyplot, whose state the whole process would share; sizes in inches, margins in shares."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size)
    figure.subplots_adjust(left=0.09, right=0.98, bottom=bottom, top=top)  # a constrained layout is as slow as drawing
    FigureCanvasAgg(figure)
    return figure


def panels(count: int) -> "tuple[Figure, list[Axes]]":
    """A picture of several panels, dressed, three in a row at most; one or two are larger."""
    across = count if count <= 3 else (2 if count == 4 else 3)
    down = math.ceil(count / across)
    scale = 1.5 if count == 1 else (1.22 if across == 2 else 1.0)
    width = across * _PANEL_INCHES[0] * scale
    height = down * _PANEL_INCHES[1] * min(scale, 1.15) + _HEADER_INCHES
    figure = blank((width, height), bottom=0.7 / height, top=1 - _HEADER_INCHES / height)
    figure.subplots_adjust(left=_LEFT_INCHES / width, right=1 - 0.3 / width, wspace=0.22, hspace=0.28)
    found = [figure.add_subplot(down, across, number) for number in range(1, count + 1)]
    for axes in found:
        dress(axes)
    return figure, found


def head(figure: "Figure", title: str, below: str = "", *, colour: str = GREY, handles: Sequence[Any] = ()) -> None:
    """The title at the left and a line of text below it; what the marks mean, where it is for all panels, at the right.

    Args:
        figure: a picture; its margins are above its panels.
        title: what is shown.
        below: of which run, one line; what is too long for the picture is cut.
        colour: of that line.
        handles: of the legend.
    """
    width, height = figure.get_size_inches()
    left, line = 0.3 / width, 0.3 / height
    longest = int(11.5 * width)
    text = below if len(below) <= longest else f"{below[: longest - 1]}…"
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
    """Grid and spines."""
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)


def count_steps(axes: "Axes") -> None:
    """Have optimizer steps along x: whole, round, and short however many there are."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: step_text(value)))


def scale_logarithmically(axes: "Axes") -> None:
    """Have powers of ten along y, and numbers between them where there is room, written out."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def step_text(step: float) -> str:
    """A step at an axis: 500, 20k, 1.5M; no digit is dropped."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**4, "k")):
        if abs(step) >= unit:
            return f"{step / (1000 if name == 'k' else unit):.12g}{name}"
    return f"{step:.12g}"


def legend_above(axes: "Axes") -> None:
    """Name what is drawn in rows between header and panel, where it covers no curve; of twin axes it names both's."""
    twins = sorted(axes.get_shared_x_axes().get_siblings(axes), key=axes.figure.axes.index)
    handles = [handle for one in twins for handle in one.get_legend_handles_labels()[0]]
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
    """A noisy curve and its running median; few points are drawn as they are, and those that are no numbers crossed.

    Args:
        axes: of a panel.
        points: (step, value), ascending.
        colour: of both lines.
        raw: what the legend calls the values.
        smooth: what it calls their median.
    """
    steps, values = [step for step, _ in points], [value for _, value in points]
    stride = max(1, math.ceil(len(points) / _MOST_POINTS))
    shown = sorted({*range(0, len(points), stride), len(points) - 1}) if points else []
    at, own = [steps[index] for index in shown], [values[index] for index in shown]
    if len(points) <= _FEW_POINTS:
        axes.plot(at, own, color=colour, linewidth=1.8, marker="o", markersize=3.5, label=raw)
    else:
        axes.plot(at, own, color=colour, alpha=0.3, linewidth=0.8, label=raw)
        inner = [index for index in shown if _reach(len(points), index) >= _half(len(points)) // 4]
        medians = smoothed(values, inner)
        axes.plot([steps[index] for index in inner], medians, color=colour, linewidth=1.8, label=smooth)
    if broken := [step for step, value in points if not math.isfinite(value)]:
        transform = axes.get_xaxis_transform()
        label = f"not finite: {len(broken)}"
        axes.plot(broken, [0.02] * len(broken), "x", color=RED, transform=transform, label=label, clip_on=False)


def smoothed(values: Sequence[float], indices: Sequence[int]) -> list[float]:
    """The median of the neighbourhood of some of the values: 5 % of them all, and at least 5 and at most 201.

    A spike does not move it and NaN does not enter; where there is nothing else it is NaN.
    """
    result = []
    for index in indices:
        reach = _reach(len(values), index)
        around = [value for value in values[index - reach : index + reach + 1] if math.isfinite(value)]
        result.append(median(around) if around else math.nan)
    return result


def _half(count: int) -> int:
    return min(max(count // 40, 2), 100)


def _reach(count: int, index: int) -> int:
    """How far the neighbourhood extends: the same on both sides, or the ends would lag."""
    return min(_half(count), index, count - 1 - index)


def fit(axes: "Axes", values: Sequence[float], others: Sequence[float] = ()) -> None:
    """Choose a frame that a few spikes cannot flatten, and say how many points lie outside of it.

    Of few points none is rare, and a spike is one that is several times as high as the others.

    Args:
        axes: of a panel.
        values: of a curve in order, the first of which is shown in any case.
        others: what else is to be shown.
    """
    finite = sorted(value for value in values if math.isfinite(value))
    if not finite:
        return
    first = next(value for value in values if math.isfinite(value))
    shown = [first, *(value for value in others if math.isfinite(value))]
    typical = finite[int(0.98 * (len(finite) - 1))]
    low, high = min([finite[0], *shown]), max([typical, *shown])
    is_rare = len(finite) > _FEW or finite[-1] > _SPIKE * abs(high)
    if is_rare and finite[-1] - low > _SPIKE * (high - low) > 0:
        high += 0.5 * (high - low)
        above = sum(value > high for value in finite)
        axes.text(0.01, 0.97, f"{above} above, up to {finite[-1]:.3g}", transform=axes.transAxes, va="top", color=RED)
    else:
        high = max(high, finite[-1])
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    axes.set_ylim(low - margin, high + margin)


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a PNG; the file is whole at any time."""
    with replaced_atomically(path) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # of a name in another script: a box is drawn
        figure.savefig(file, dpi=120, format="png", metadata=PICTURE_METADATA)
