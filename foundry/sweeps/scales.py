"""Colors and scales that the panels of a sweep's figure share."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import quantiles
from typing import TYPE_CHECKING

from foundry.sweeps.parameters import Parameter, shorten
from foundry.sweeps.reading import JobReport, SweepReport
from foundry.tracking.plot_style import BLUE, GREEN, GREY, ORANGE, RED, scale_logarithmically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDE_SPAN = 20.0
"""Ratio of largest to smallest value above which an axis of positive values may be logarithmic."""

PRUNED = "#c2a5cf"
"""Color of jobs that a search ended early."""

PAUSED = "#8fa3c7"
"""Color of jobs that wait at a rung of a search."""

_HUES = (BLUE, "#db2777", "#0d9488", "#7c3aed", "#a16207", "#0891b2", "#475569", "#65a30d")
"""Colors of categories; except for blue, that of finished jobs, none is the color of a state or of the best job."""
_SCALE, _SCALE_END = "viridis", 0.75  # the light end of viridis is hard to see
_MOST_COLOURS = 5  # colors in a legend
LONGEST_CATEGORY = 9  # characters that remain of the long name of a category
LONGEST_NAME = 40  # characters of an axis label
NAME_INCHES = 0.072  # width of a character
_SHARE_METRICS = ("accuracy", "rate", "share", "missing", "success", "match")


def is_share_metric(sweep: SweepReport, values: Iterable[float]) -> bool:
    """Return whether a metric is a fraction between 0 and 1, such as an accuracy, which needs a linear axis.

    A metric with all values between 0 and 1 is a fraction if a higher value is better, or if its name contains a word
    such as `accuracy`; any other metric, such as a loss, is not.
    """
    is_named = any(word in sweep.metric for word in _SHARE_METRICS)
    return (is_named or not sweep.minimize) and are_fractions(values)


def are_fractions(values: Iterable[float]) -> bool:
    """Return whether all finite values are between 0 and 1."""
    return all(0 <= value <= 1 for value in values if math.isfinite(value))


@dataclass(frozen=True)
class Colours:
    """Colours of a parameter's values: hues for at most eight categories, else a scale from dark to light."""

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
        """Return the color of the parameter's value in a job."""
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
            values: values of the metric, at least one of them finite; NaN and infinities are ignored.
            is_linear: never choose a logarithmic axis.
        """
        finite = sorted(value for value in values if math.isfinite(value))
        low, high = finite[0], finite[-1]
        is_log = not is_linear and low > 0 and high > WIDE_SPAN * low
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


def size_inches(axes: "Axes") -> tuple[float, float]:
    """Return width and height of a panel without its labels."""
    return axes.bbox.width / axes.figure.dpi, axes.bbox.height / axes.figure.dpi


def resolve_colour(sweep: SweepReport, job: JobReport) -> str:
    """Return the color of a job: orange for the best job, else the color of the job's state."""
    if job is sweep.best:
        return ORANGE
    if job.has_failed:
        return RED
    if job.is_pruned:
        return PRUNED
    if job.state == "paused":
        return PAUSED
    return BLUE if job.is_complete and job.has_metric else GREEN if job.is_going else GREY


def name_colours(axes: "Axes", colours: Colours) -> None:
    """Draw a legend row above the panel: name of the colored parameter, and at most five of its values."""
    from matplotlib.lines import Line2D

    parameter = colours.parameter
    values, name = parameter.values, shorten(parameter.name, 22)
    if len(values) > _MOST_COLOURS:
        name = f"{name} ({len(values)} values)"
    last = min(len(values), _MOST_COLOURS) - 1
    handles = [Line2D([], [], linestyle="", label=name)]
    for value in [values[place * (len(values) - 1) // max(last, 1)] for place in range(last + 1)]:
        label = parameter.label(value, LONGEST_CATEGORY)
        handles.append(Line2D([], [], linestyle="", marker="o", markersize=6, color=colours[value], label=label))
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
