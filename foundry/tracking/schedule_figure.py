"""plots/schedule.png: learning rate, weight decay and batch size over the run."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from foundry.tracking.plot_style import BLUE, GREEN, GREY, ORANGE, blank, dress
from foundry.training.events import Phase, PlannedUpdate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHADES = {"warmup": ORANGE, "stable": GREEN, "constant": GREEN, "decay": BLUE, "floor": GREY}


def schedule_figure(updates: Sequence[PlannedUpdate], phases: Sequence[Phase], step: int = 0) -> "Figure":
    """Three panels over the optimizer steps, with the learning rate's phases shaded.

    Args:
        updates: every update, or a selection that shows every corner.
        phases: of the learning rate.
        step: the last step taken, marked while the run is under way.
    """
    figure = blank((8, 6.6), bottom=0.08, top=0.93)
    top, middle, bottom = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": (3, 1, 1), "hspace": 0.16})
    steps = [update.step for update in updates]
    panels: list[tuple[Axes, str, list[float], str]] = [
        (top, "learning rate", [update.lr for update in updates], "default"),
        (middle, "weight decay", [update.weight_decay for update in updates], "default"),
        (bottom, "global batch", [float(update.global_batch_size) for update in updates], "steps-mid"),
    ]
    for axes, label, values, drawstyle in panels:
        dress(axes)
        _shade(axes, phases)
        marker = "o" if len(steps) == 1 else None
        axes.plot(steps, values, color=BLUE, linewidth=1.8, marker=marker, drawstyle=drawstyle)
        axes.set_ylabel(label)
        axes.set_ylim(0, max(values) * 1.12 or 1.0)
        if 0 < step < steps[-1]:
            axes.axvline(step, color=GREY, linestyle=":", linewidth=1.4)
    for axes in (top, middle):
        axes.tick_params(labelbottom=False)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    top.set_title("Schedule", loc="left", fontweight="bold")
    _name(top, phases)
    bottom.set_xlabel("optimizer step" + (f" (dotted: step {step})" if 0 < step < steps[-1] else ""))
    return figure


def _shade(axes: "Axes", phases: Sequence[Phase]) -> None:
    for phase in phases:
        # Half a step to each side, so that neighbours meet and a phase of one step is seen.
        axes.axvspan(phase.first_step - 0.5, phase.last_step + 0.5, color=_SHADES[phase.name], alpha=0.07, linewidth=0)


def _name(axes: "Axes", phases: Sequence[Phase]) -> None:
    """Write each phase's name and steps above it, where there is room; else beside the title."""
    whole = phases[-1].last_step - phases[0].first_step + 1 if phases else 1
    narrow = list[str]()
    for phase in phases:
        share = (phase.last_step - phase.first_step + 1) / whole
        text = f"{phase.name} {phase.first_step}-{phase.last_step}"
        if share > 0.012 * len(text):
            middle = (phase.first_step + phase.last_step) / 2
            colour = _SHADES[phase.name]
            axes.text(middle, 0.97, text, transform=axes.get_xaxis_transform(), ha="center", va="top", color=colour)
        else:
            narrow.append(text)
    axes.set_title(", ".join(narrow), loc="right", fontsize="medium", color=GREY)
