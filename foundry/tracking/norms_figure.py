"""Figure plots/norms.png: per block, the gradient norm and the ratio of update norm to weight norm."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from foundry.config.metrics import NORMS
from foundry.tracking.plot_style import count_steps, head, panels, scale_logarithmically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GRADIENT, _WEIGHT, _UPDATE = (f"{name}/" for name in NORMS)
_MOST_NAMES, _FEW_POINTS = 12, 20
_WIDE = 5.0  # ratio of the largest to the smallest norm that makes the axis logarithmic

Curves = Mapping[str, Mapping[int, float]]


def norms_figure(logged: Curves, run_name: str = "") -> "Figure | None":
    """Draw each block's gradient norm before clipping, and its update norm divided by its weight norm.

    Args:
        logged: training metrics by name in metrics.jsonl, each as value by step.
        run_name: name of the run, shown under the title.

    Returns:
        The figure; None if no norms were logged.
    """
    blocks = [name.removeprefix(_GRADIENT) for name in logged if name.startswith(_GRADIENT)]
    if not blocks:
        return None
    gradients = {block: logged[_GRADIENT + block] for block in blocks}
    shares = {block: _ratio(logged.get(_UPDATE + block, {}), logged.get(_WEIGHT + block, {})) for block in blocks}
    figure, (left, right) = panels(2)
    figure.subplots_adjust(right=0.8)
    _draw(left, "gradient norm, before clipping", gradients)
    _draw(right, "update norm / weight norm", shares)
    indices = _spread(len(blocks), _MOST_NAMES)
    lines = [left.lines[number] for number in indices]
    legend = figure.legend(handles=lines, loc="center left", bbox_to_anchor=(0.81, 0.5), frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)
    head(figure, "Norms by block", run_name)
    return figure


def _ratio(updates: Mapping[int, float], weights: Mapping[int, float]) -> dict[int, float]:
    """Return update norm / weight norm at the steps that have both, except if the weight norm is 0."""
    return {step: updates[step] / weights[step] for step in sorted(updates) if weights.get(step)}


def _draw(axes: "Axes", title: str, curves: Curves) -> None:
    """Draw one line per block, from dark to light in the order of the model."""
    from matplotlib import colormaps

    colours = colormaps["viridis"]
    axes.set_title(title, loc="left", fontsize="medium")
    count_steps(axes)
    norms = [value for values in curves.values() for value in values.values() if value > 0 and math.isfinite(value)]
    is_log = bool(norms) and max(norms) > _WIDE * min(norms)
    for number, (block, values) in enumerate(curves.items()):
        steps = sorted(values)
        colour = colours(0.9 * number / max(1, len(curves) - 1))
        marker = "o" if len(steps) <= _FEW_POINTS else ""
        heights = [values[step] if values[step] > 0 or not is_log else math.nan for step in steps]  # norm 0 is a gap
        axes.plot(steps, heights, color=colour, linewidth=1.4, marker=marker, markersize=3.5, label=block)
    if is_log:
        scale_logarithmically(axes)


def _spread(count: int, max_count: int) -> Sequence[int]:
    """Return at most `max_count` numbers below `count`, evenly spaced, including the first and the last."""
    if count <= max_count:
        return range(count)
    return [round(number * (count - 1) / (max_count - 1)) for number in range(max_count)]
