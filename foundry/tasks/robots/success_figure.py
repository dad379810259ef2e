"""Figure of a policy's success rate over the run."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from foundry.config.metrics import val_metric_names
from foundry.tasks.robots.names import SUCCESS_METRICS
from foundry.tracking.plot_style import GREEN, frame, legend_above

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATE, LOW, HIGH, _ = val_metric_names(SUCCESS_METRICS)


def success_figure(measured: Mapping[str, Mapping[int, float]], run_name: str = "") -> "Figure | None":
    """Plot the success rate over optimizer steps, with a band for its 95 % interval.

    Args:
        measured: for each evaluation metric by name, its values by step.
        run_name: name of the run, shown below the title.

    Returns:
        None if no success rate has been measured.
    """
    if not measured.get(RATE):
        return None
    figure, axes = frame("Success", None, "fraction of episodes (band: 95 % interval)", below=run_name)
    steps = sorted(measured[RATE])
    rates = [measured[RATE][step] for step in steps]
    low, high = (
        [measured.get(name, {}).get(step, rate) for step, rate in zip(steps, rates, strict=True)]
        for name in (LOW, HIGH)
    )
    axes.fill_between(steps, low, high, color=GREEN, alpha=0.2, linewidth=0)
    axes.vlines(steps, low, high, color=GREEN, alpha=0.5, linewidth=1.0)  # the band of a single evaluation is invisible
    axes.plot(steps, rates, color=GREEN, linewidth=1.8, marker="o", markersize=5, label=f"success {rates[-1]:.3f}")
    axes.set_xlim(left=0)
    axes.set_ylim(-0.02, 1.02)
    legend_above(axes)
    return figure
