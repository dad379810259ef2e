"""Figure plots/schedule.png: learning rate, weight decay and batch size over the run."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from foundry.core.events import Phase, PlannedUpdate
from foundry.tracking.plot_style import BLUE, GREEN, GREY, ORANGE, blank, count_steps, dress, head

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHADES = {"warmup": ORANGE, "stable": GREEN, "constant": GREEN, "decay": BLUE, "floor": GREY}


def schedule_figure(
    updates: Sequence[PlannedUpdate], phases: Sequence[Phase], step: int = 0, run_name: str = ""
) -> "Figure":
    """Draw learning rate, weight decay and global batch size over the optimizer steps, a panel each.

    The phases of the learning rate are shaded. A weight decay or batch size that stays constant is listed in the header
    instead.

    Args:
        updates: every update, or a selection that includes every corner of the curves.
        phases: phases of the learning rate.
        step: last completed step, marked while the run continues.
        run_name: name of the run, shown under the title.
    """
    steps = [update.step for update in updates]
    rows: list[tuple[str, list[float], str]] = [
        ("learning rate", [update.lr for update in updates], "default"),
        ("weight decay", [update.weight_decay for update in updates], "default"),
        ("global batch", [float(update.global_batch_size) for update in updates], "steps-mid"),
    ]
    curves = [row for row in rows if row is rows[0] or len(set(row[1])) > 1]
    constant = [f"{label} {values[0]:g}" for label, values, _ in rows if (label, values, _) not in curves]
    height = 4.2 + 1.3 * (len(curves) - 1)
    figure = blank((8, height), bottom=0.55 / height, top=1 - 1.05 / height)
    head(figure, "Schedule", ", ".join([*([run_name] if run_name else []), *constant]))
    heights = (3, 1, 1)[: len(curves)]
    grid = figure.subplots(len(curves), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})
    figure.subplots_adjust(hspace=0.2)
    panels: list[Axes] = list(grid[:, 0])
    for axes, (label, values, drawstyle) in zip(panels, curves, strict=True):
        dress(axes)
        _shade(axes, phases)
        _draw_curve(axes, steps, values, label, drawstyle)
        if 0 < step < steps[-1]:
            axes.axvline(step, color=GREY, linestyle=":", linewidth=1.4)
    _name(panels[0], phases)
    count_steps(panels[-1])
    for axes in panels[:-1]:
        axes.tick_params(labelbottom=False)
    if 0 < step < steps[-1]:
        panels[-1].set_xlabel(f"optimizer step (dotted: step {step})")
    return figure


def _draw_curve(axes: "Axes", steps: list[int], values: list[float], label: str, drawstyle: str) -> None:
    """Draw a value over the optimizer steps, on an axis from 0."""
    marker = "o" if len(steps) == 1 else None
    axes.plot(steps, values, color=BLUE, linewidth=1.8, marker=marker, drawstyle=drawstyle)
    axes.set_ylabel(label)
    axes.set_ylim(0, max(values) * 1.12 or 1.0)
    if label != "global batch":
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)


def _shade(axes: "Axes", phases: Sequence[Phase]) -> None:
    for phase in phases:
        # Extend by half a step to each side, so that phases touch and a phase of one step is visible.
        axes.axvspan(phase.first_step - 0.5, phase.last_step + 0.5, color=_SHADES[phase.name], alpha=0.07, linewidth=0)


def _name(axes: "Axes", phases: Sequence[Phase]) -> None:
    """Write each phase's name and steps at the top of its area, or beside the title if the area is too narrow."""
    num_steps = phases[-1].last_step - phases[0].first_step + 1 if phases else 1
    narrow = list[str]()
    for phase in phases:
        share = (phase.last_step - phase.first_step + 1) / num_steps
        text = f"{phase.name} {phase.first_step}-{phase.last_step}"
        if share > 0.012 * len(text):
            middle = (phase.first_step + phase.last_step) / 2
            colour = _SHADES[phase.name]
            axes.text(middle, 0.97, text, transform=axes.get_xaxis_transform(), ha="center", va="top", color=colour)
        else:
            narrow.append(text)
    axes.set_title(", ".join(narrow), loc="right", fontsize="medium", color=GREY)
