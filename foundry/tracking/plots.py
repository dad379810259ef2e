"""plots/loss.png, plots/schedule.png and, of a policy, plots/success.png."""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from foundry.config.metrics import LOSS
from foundry.run_dir.files import make_folder
from foundry.run_dir.names import METRICS, PLOTS
from foundry.tracking.console_progress import unigram_entropy
from foundry.tracking.metrics_file import is_evaluation, read_metrics
from foundry.tracking.plot_style import BLUE, GREEN, GREY, ORANGE, RED, frame, save_figure
from foundry.tracking.safe_observer import tolerant
from foundry.tracking.schedule_figure import schedule_figure
from foundry.tracking.success_figure import HIGH, LOW, RATE, success_figure
from foundry.training.events import Evaluated, Phase, PlannedUpdate, RunEnded, RunStarted, StepLogged

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LARGEST_SHARE_OF_TIME = 0.02
_MOST_POINTS = 4000  # more cannot be told apart and take seconds to draw


class Plots:
    """Draws the loss, the learning rate and success in episodes at evaluations and at the end.

    Drawing takes tenths of a second, so an evaluation that follows too soon upon the last drawing is passed over; at
    the end everything is drawn.

    Args:
        run_dir: the run directory; pictures go to `plots/` in it.
    """

    def __init__(self, *, run_dir: Path) -> None:
        self._run_dir = Path(run_dir)
        self._loss: dict[int, float] = {}
        self._measured: dict[str, dict[int, float]] = {}
        self._metric: str | None = None
        self._entropy: float | None = None
        self._updates: Sequence[PlannedUpdate] = ()
        self._phases: Sequence[Phase] = ()
        self._next_drawing = 0.0

    @tolerant
    def on_start(self, event: RunStarted) -> None:
        """Take over what an earlier start of the run measured."""
        self._entropy = unigram_entropy(event.plan)
        self._updates, self._phases, self._metric = event.updates, event.phases, event.metric
        if (self._run_dir / METRICS).exists():
            for record in read_metrics(self._run_dir):
                if is_evaluation(record):
                    self._remember(record["step"], record)
                else:
                    self._loss[record["step"]] = record["loss"]

    @tolerant
    def on_step(self, event: StepLogged) -> None:
        """Remember the loss."""
        self._loss[event.step] = event.loss

    @tolerant
    def on_evaluation(self, event: Evaluated) -> None:
        """Remember the held-out loss and the run's metric, and draw."""
        self._remember(event.step, event.metrics)
        begin = time.monotonic()
        if begin >= self._next_drawing:
            self._draw(event.step)
            now = time.monotonic()
            self._next_drawing = now + (now - begin) / _LARGEST_SHARE_OF_TIME

    @tolerant
    def on_end(self, event: RunEnded) -> None:
        """Draw."""
        self._draw(max(self._loss, default=0))

    def _draw(self, step: int) -> None:
        folder = make_folder(self._run_dir / PLOTS)
        points = sorted(self._loss.items())
        held_out = sorted(self._measured.get(LOSS, {}).items())
        judged = None if self._metric in (None, LOSS) else sorted(self._measured.get(self._metric or "", {}).items())
        if points or held_out or judged:
            figure = loss_figure(points, held_out, self._entropy)
            if judged and self._metric is not None:
                add_metric(figure, self._metric, judged)
            save_figure(figure, folder / "loss.png")
        if self._measured.get(RATE):
            save_figure(success_figure(self._measured), folder / "success.png")
        if self._updates:
            save_figure(schedule_figure(self._updates, self._phases, step), folder / "schedule.png")

    def _remember(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name in {LOSS, self._metric, RATE, LOW, HIGH} & metrics.keys():
            self._measured.setdefault(str(name), {})[step] = metrics[str(name)]


def add_metric(figure: "Figure", name: str, points: Sequence[tuple[int, float]]) -> None:
    """Draw the metric by which a run is judged, where that is no loss, over the same steps on an axis of its own.

    Args:
        figure: of the losses.
        name: of the metric.
        points: (step, value), ascending.
    """
    figure.subplots_adjust(right=0.91)  # room for the numbers of this axis
    axes = figure.axes[0].twinx()
    steps, values = zip(*points, strict=True)
    axes.plot(steps, values, color=GREEN, linewidth=1.2, marker="s", markersize=4, label=f"{name} {_final(values)}")
    axes.set_ylabel(name, color=GREEN)
    axes.legend(frameon=False, loc="upper left")


def smoothed(values: Sequence[float], indices: Sequence[int]) -> list[float]:
    """The median of the neighbourhood of some of the values: 5 % of them all, and at least 5 and at most 201.

    A spike does not move it and NaN does not enter; where there is nothing else it is NaN.
    """
    half = min(max(len(values) // 40, 2), 100)
    result = []
    for index in indices:
        reach = min(half, index, len(values) - 1 - index)  # the same on both sides, or the ends would lag
        around = [value for value in values[index - reach : index + reach + 1] if math.isfinite(value)]
        result.append(median(around) if around else math.nan)
    return result


def loss_figure(
    points: Sequence[tuple[int, float]], held_out: Sequence[tuple[int, float]], entropy: float | None
) -> "Figure":
    """The training loss, its running median, the held-out loss and a reference.

    Args:
        points: (step, training loss), ascending.
        held_out: (step, held-out loss), ascending.
        entropy: of the unigram distribution of the text, in nats; None for other data.
    """
    figure, axes = frame("Loss", "optimizer step", "loss (mean over the global batch)")
    if points:
        steps, losses = zip(*points, strict=True)
        shown = range(0, len(points), max(1, math.ceil(len(points) / _MOST_POINTS)))
        at, median_losses = [steps[index] for index in shown], smoothed(losses, shown)
        marker = "o" if len(points) == 1 else None
        axes.plot(at, [losses[index] for index in shown], color=BLUE, alpha=0.3, linewidth=0.8, marker=marker)
        axes.plot(at, median_losses, color=BLUE, linewidth=1.8, label=f"training {_final(losses)}")
        broken = [step for step, loss in points if not math.isfinite(loss)]
        if broken:
            transform = axes.get_xaxis_transform()
            label = f"not finite: {len(broken)}"
            axes.plot(broken, [0.02] * len(broken), "x", color=RED, transform=transform, label=label, clip_on=False)
    if held_out:
        steps, losses = zip(*held_out, strict=True)
        label = f"held out {_final(losses)}"
        axes.plot(steps, losses, color=ORANGE, linewidth=1.2, marker="o", markersize=5, label=label)
    if entropy is not None:
        axes.axhline(entropy, color=GREY, linestyle=":", linewidth=1.4, label=f"unigram entropy {entropy:.3f}")
    _fit(axes, [loss for _, loss in points], [loss for _, loss in held_out] + ([] if entropy is None else [entropy]))
    axes.legend(frameon=False, loc="upper right")
    return figure


def _fit(axes: "Axes", losses: Sequence[float], others: Sequence[float]) -> None:
    """Choose a frame that a few spikes cannot flatten, and say how many points lie above it."""
    finite = sorted(loss for loss in losses if math.isfinite(loss))
    if not finite:
        return
    first = next(loss for loss in losses if math.isfinite(loss))
    shown = [first, *(value for value in others if math.isfinite(value))]
    typical = finite[int(0.98 * (len(finite) - 1))]
    low, high = min([finite[0], *shown]), max([typical, *shown])
    if finite[-1] - low > 4 * (high - low) > 0:
        high += 0.5 * (high - low)
        above = sum(loss > high for loss in finite)
        axes.text(0.01, 0.97, f"{above} above, up to {finite[-1]:.3g}", transform=axes.transAxes, va="top", color=RED)
    else:
        high = max(high, finite[-1])
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    axes.set_ylim(low - margin, high + margin)


def _final(values: Sequence[float]) -> str:
    return f"{values[-1]:.4f}"
