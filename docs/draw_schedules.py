"""Draw the pictures of schedules in docs/images with foundry's classes: `python docs/draw_schedules.py [FOLDER]`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from foundry.config.schemas.scheduler import DecayStyle, EvaluateAt, IncrementStyle
from foundry.core.batch_sizes import BatchSizes
from foundry.core.duration import Budget
from foundry.optim.schedules import WSD, Constant, Cosine, InverseSquareRoot, Linear, Schedule, WeightDecay
from foundry.planning.derive import planned_updates, resolve_phases
from foundry.tracking.plot_style import BLUE, GREEN, GREY, ORANGE, RED, blank, dress, save_figure
from foundry.tracking.schedule_figure import schedule_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IMAGES = Path(__file__).with_name("images")
_WARMUP, _HORIZON, _DECAY, _FLOOR = 100.0, 1000.0, 300.0, 0.1


def curves() -> "Figure":
    """Draw the learning rate of four schedulers, and the effect of `evaluate_at` on ten updates."""
    figure, (left, right) = _two_panels("Learning rate by scheduler", "Ten updates, cosine, warm-up of two")
    lengths = {"max_lr": 1.0, "warmup": _WARMUP, "horizon": _HORIZON, "min_lr": _FLOOR}
    named = (
        (Constant(**lengths), GREY, "constant", (560, 1.03)),
        (Linear(**lengths), BLUE, "linear", (228, 0.68)),
        (Cosine(**lengths), ORANGE, "cosine", (330, 0.9)),
        (InverseSquareRoot(**lengths), GREEN, "inverse_square_root", (180, 0.32)),
    )
    for schedule, colour, name, at in named:
        _draw(left, schedule, range(1101), colour)
        left.text(*at, name, color=colour)
    _mark(left, _WARMUP, "warm-up")
    _mark(left, _HORIZON, "horizon", left=True)
    _axes(left, "optimizer step", "share of hparams.lr", ticks=range(0, 1001, 200))

    for where, colour, marker in ((EvaluateAt.end, BLUE, "o"), (EvaluateAt.start, ORANGE, "s")):
        schedule = Cosine(max_lr=1.0, warmup=2.0, horizon=10.0, evaluate_at=where)
        rates = [schedule.lr(n, n + 1) for n in range(10)]
        right.plot(range(1, 11), rates, color=colour, linewidth=1.4, marker=marker, markersize=6, clip_on=False)
    right.text(6.4, 0.74, "evaluate_at=start", color=ORANGE)
    right.text(5.3, 0.42, "evaluate_at=end", color=BLUE, ha="right")
    _axes(right, "update", "", ticks=range(1, 11))
    return figure


def wsd() -> "Figure":
    """Draw each `decay_style` of WSD, and a run of 600 steps with two horizons, 1000 steps and 600 steps."""
    figure, (left, right) = _two_panels("scheduler=wsd by decay_style", "A run of 600 steps")
    colours = {"cosine": ORANGE, "linear": BLUE, "exponential": GREEN, "minus_sqrt": RED}
    for name, colour in colours.items():
        _draw(left, _wsd(_HORIZON, _DECAY, DecayStyle[name]), range(640, 1041), colour, name)
    left.legend(frameon=False, loc="lower left", bbox_to_anchor=(0.16, 0.07))
    _mark(left, _HORIZON - _DECAY, "horizon - decay")
    _mark(left, _HORIZON, "horizon", left=True)
    _axes(left, "optimizer step", "share of hparams.lr", ticks=range(650, 1001, 50))

    whole, shrunk = _wsd(1000.0, 300.0, DecayStyle.linear), _wsd(600.0, 180.0, DecayStyle.linear, warmup=60.0)
    _draw(right, whole, range(601), BLUE)
    _draw(right, shrunk, range(601), ORANGE)
    right.plot(range(600, 1001), [whole.lr_at(n) for n in range(600, 1001)], color=BLUE, linestyle=":", linewidth=1.6)
    right.text(340, 1.03, 'horizon="1000": the same curve, cut', color=BLUE, ha="center", size="small")
    right.text(475, 0.3, 'horizon="1.0": a shorter one', color=ORANGE, ha="right", size="small")
    _mark(right, 600.0, "end of the run")
    _axes(right, "optimizer step", "", ticks=range(0, 1001, 200))
    return figure


def weight_decay() -> "Figure":
    """Draw a rising and a falling weight decay, each with both increment styles."""
    figure, panels = _two_panels("Weight decay from 0.01 to 0.1", "Weight decay from 0.1 to 0.01")
    for axes, (start, end) in zip(panels, ((0.01, 0.1), (0.1, 0.01)), strict=True):
        for style, colour in ((IncrementStyle.linear, BLUE), (IncrementStyle.cosine, ORANGE)):
            curve = WeightDecay(start=start, end=end, horizon=_HORIZON, style=style)
            axes.plot(range(1101), [curve.at(n) for n in range(1101)], color=colour, linewidth=2)
        _mark(axes, _HORIZON, "weight_decay_horizon", left=True)
        _axes(axes, "optimizer step", "weight decay" if start < end else "", range(0, 1001, 200), top=0.113)
    panels[0].text(300, 0.045, "linear", color=BLUE, ha="right")
    panels[0].text(300, 0.019, "cosine", color=ORANGE, ha="left")
    panels[1].text(330, 0.064, "linear", color=BLUE, ha="right")
    panels[1].text(330, 0.088, "cosine", color=ORANGE, ha="left")
    return figure


def batch_sizes() -> "Figure":
    """Draw two growing batch sizes, and a WSD schedule under a batch ramp, with lengths in steps or in samples."""
    figure, (left, right) = _two_panels("Global batch size", "WSD under a ramp from 8 to 16, 100 steps")
    ramp = BatchSizes.ramp(start=64, increment=64, over_samples=300_000, final=512)
    stepwise = BatchSizes.parse("0:128 120k:256 360k:512")
    samples = range(0, 450_001, 250)
    for sizes, colour in ((ramp, BLUE), (stepwise, ORANGE)):
        left.plot([n / 1000 for n in samples], [sizes.at(n) for n in samples], color=colour, linewidth=2)
    left.text(175, 415, "batch_ramp", color=BLUE, ha="right")
    left.text(450, 218, 'batch_schedule="0:128 120k:256 360k:512"', color=ORANGE, ha="right", size="small")
    _axes(left, "thousand samples consumed", "samples per step", range(0, 401, 100), top=560)

    ramp = BatchSizes.ramp(start=8, increment=8, over_samples=160, final=16)
    budget = Budget(total_samples=int(ramp.samples_after(100)), batch_sizes=ramp, samples_per_epoch=1)
    own = WSD.from_durations(
        budget=budget, warmup="10", horizon="1.0", decay="20", max_lr=1.0, decay_style=DecayStyle.linear
    )
    by_steps = WSD(max_lr=1.0, warmup=160.0, horizon=1600.0, decay=320.0, decay_style=DecayStyle.linear)
    for schedule, colour in ((by_steps, RED), (own, BLUE)):
        rates = [schedule.lr(*(int(ramp.samples_after(k)) for k in (step - 1, step))) for step in range(1, 101)]
        right.plot(range(1, 101), rates, color=colour, linewidth=2)
    right.text(78, 0.35, "foundry: lengths in steps\nfollow the ramp", color=BLUE, ha="right", va="center")
    right.text(56, 1.03, "lengths counted as steps x 16", color=RED, ha="center")
    _axes(right, "optimizer step", "share of hparams.lr", range(0, 101, 20))
    return figure


def plan() -> "Figure":
    """Draw an example of schedule.png, the figure of a planned run."""
    sizes = BatchSizes.ramp(start=64, increment=64, over_samples=60_000, final=256)
    budget = Budget(total_samples=int(sizes.samples_after(1000)), batch_sizes=sizes, samples_per_epoch=1)
    schedule = WSD.from_durations(
        budget=budget,
        warmup="150",
        horizon="1.0",
        decay="0.3",
        start_weight_decay=0.02,
        end_weight_decay=0.1,
        weight_decay_incr_style=IncrementStyle.cosine,
        max_lr=1e-3,
        decay_style=DecayStyle.minus_sqrt,
    )
    return schedule_figure(
        list(planned_updates(schedule, budget, 0.1)), resolve_phases(schedule, budget), run_name="scheduler=wsd"
    )


def _wsd(horizon: float, decay: float, style: DecayStyle, warmup: float = _WARMUP) -> WSD:
    return WSD(max_lr=1.0, warmup=warmup, horizon=horizon, min_lr=_FLOOR, decay=decay, decay_style=style)


def _two_panels(*titles: str) -> "tuple[Figure, Sequence[Axes]]":
    figure = blank((10.5, 3.9), bottom=0.15, top=0.9)
    figure.subplots_adjust(left=0.065, right=0.985, wspace=0.16)
    panels: Sequence[Axes] = figure.subplots(1, len(titles))
    for axes, title in zip(panels, titles, strict=True):
        dress(axes)
        axes.set_title(title, loc="left", fontweight="bold")
    return figure, panels


def _draw(axes: "Axes", schedule: Schedule, samples: Sequence[int], colour: str, name: str | None = None) -> None:
    """Plot the learning rate against the number of samples; in most of the pictures, a step has one sample."""
    axes.plot(samples, [schedule.lr_at(n) for n in samples], color=colour, linewidth=2, label=name)


def _mark(axes: "Axes", x: float, name: str, *, left: bool = False) -> None:
    """Draw a vertical line with its name at the lower end."""
    axes.axvline(x, color=GREY, linestyle="--", linewidth=0.9)
    side = "right" if left else "left"
    axes.text(x, 0.02, f" {name} ", color=GREY, size="small", ha=side, transform=axes.get_xaxis_transform())


def _axes(axes: "Axes", x: str, y: str, ticks: Sequence[int], top: float = 1.14) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_xticks(ticks)
    axes.set_ylim(0, top)


PICTURES = (curves, wsd, weight_decay, batch_sizes, plan)


def main(folder: Path) -> None:
    """Write every picture of `PICTURES` into a folder."""
    for picture in PICTURES:
        save_figure(picture(), folder / f"{picture.__name__}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES)
