"""What foundry's pictures share: colours, an empty frame, and how a file is written."""

from pathlib import Path
from typing import TYPE_CHECKING

from foundry.run_dir.files import replaced_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE = "#2563eb"
ORANGE = "#ea580c"
GREEN = "#059669"
GREY = "#6b7280"
RED = "#dc2626"


def frame(title: str, x: str, y: str) -> "tuple[Figure, Axes]":
    """A picture of one panel."""
    figure = blank((8, 4.5), bottom=0.12, top=0.9)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    dress(axes)
    return figure, axes


def blank(size: tuple[float, float], *, bottom: float, top: float) -> "Figure":
    """A picture without pyplot, whose state the whole process would share; sizes in inches, margins in shares."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size)
    figure.subplots_adjust(left=0.09, right=0.98, bottom=bottom, top=top)  # a constrained layout is as slow as drawing
    FigureCanvasAgg(figure)
    return figure


def dress(axes: "Axes") -> None:
    """Grid, spines and whole steps along x."""
    from matplotlib.ticker import MaxNLocator

    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9))
    axes.margins(x=0.01)


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a PNG; the file is whole at any time."""
    with replaced_atomically(path) as file:
        figure.savefig(file, dpi=120, format="png")
