"""Figures in plots/: loss.png, metrics.png, schedule.png, norms.png and the figures of tasks."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from foundry.config.metrics import LOSS
from foundry.core.events import Evaluated, Phase, PlannedUpdate, RunEnded, RunStarted, StepLogged
from foundry.core.tasks import plots
from foundry.run_dir.files import make_folder
from foundry.run_dir.names import METRICS, PLOTS
from foundry.run_dir.redact import one_line
from foundry.tracking.console_progress import unigram_entropy
from foundry.tracking.metrics_figure import metrics_figure
from foundry.tracking.metrics_file import evaluation_record, is_evaluation, iterate_metrics, step_record
from foundry.tracking.mlflow.parent_link import ParentLink
from foundry.tracking.norms_figure import norms_figure
from foundry.tracking.plot_style import (
    GREEN,
    GREY,
    ORANGE,
    RAW,
    SMOOTHED,
    draw_series,
    fit,
    frame,
    legend_above,
    save_figure,
)
from foundry.tracking.safe_observer import tolerant
from foundry.tracking.schedule_figure import schedule_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LARGEST_SHARE_OF_TIME = 0.02

Series = dict[str, dict[int, float]]
"""Values by step, keyed by metric name."""


class Plots:
    """Observer that draws the figures, at evaluations and at the end.

    Drawing takes tenths of a second. Nothing is drawn at an evaluation that follows too soon after the last drawing, so
    that drawing takes at most 2 % of the time. At the end, all figures are drawn.

    Args:
        run_dir: the run directory; figures are written to its folder `plots/`.
        run_name: name under each title; None for the name of the run directory, or the swept settings of a sweep's job.
    """

    def __init__(self, *, run_dir: Path, run_name: str | None = None) -> None:
        self._run_dir = Path(run_dir)
        self._run_name = run_name
        self._logged: Series = {}
        self._measured: Series = {}
        self._metric: str | None = None
        self._entropy: float | None = None
        self._updates: Sequence[PlannedUpdate] = ()
        self._phases: Sequence[Phase] = ()
        self._next_drawing = 0.0

    @tolerant
    def on_start(self, event: RunStarted) -> None:
        """Load the metrics that an earlier start of the run wrote."""
        self._entropy = unigram_entropy(event.plan)
        self._updates, self._phases, self._metric = event.updates, event.phases, event.metric
        if (self._run_dir / METRICS).exists():
            for record in iterate_metrics(self._run_dir):
                _remember(self._measured if is_evaluation(record) else self._logged, record)

    @tolerant
    def on_step(self, event: StepLogged) -> None:
        """Store the metrics of the step."""
        _remember(self._logged, step_record(event))

    @tolerant
    def on_evaluation(self, event: Evaluated) -> None:
        """Store the metrics of the evaluation, and draw all figures unless the last drawing is too recent."""
        _remember(self._measured, evaluation_record(event))
        begin = time.monotonic()
        if begin >= self._next_drawing:
            self._draw(event.step)
            now = time.monotonic()
            self._next_drawing = now + (now - begin) / _LARGEST_SHARE_OF_TIME

    @tolerant
    def on_end(self, event: RunEnded) -> None:
        """Draw all figures."""
        self._draw(max(self._logged.get("loss", ()), default=0))

    def _draw(self, step: int) -> None:
        folder, name = make_folder(self._run_dir / PLOTS), self._name()
        points = sorted(self._logged.get("loss", {}).items())
        held_out = sorted(self._measured.get(LOSS, {}).items())
        curve = None if self._metric in (None, LOSS) else sorted(self._measured.get(self._metric or "", {}).items())
        pictures: dict[str, Figure | None] = {
            "metrics": metrics_figure(self._logged, self._measured, name),
            "norms": norms_figure(self._logged, name),
        }
        if points or held_out or curve:
            pictures["loss"] = losses = loss_figure(points, held_out, self._entropy, name)
            if curve and self._metric is not None:
                add_metric(losses, self._metric, curve)
        for stem, plot in plots().items():
            pictures[stem] = resolve_name(plot.draw)(self._measured, name)
        if self._updates:
            pictures["schedule"] = schedule_figure(self._updates, self._phases, step, name)
        for stem, figure in pictures.items():
            if figure is not None:
                save_figure(figure, folder / f"{stem}.png")

    def _name(self) -> str:
        """Return the name under the titles, by default the run's name in MLflow."""
        link = None if self._run_name is not None else ParentLink.load(self._run_dir)
        return one_line(self._run_name or (self._run_dir.absolute().name if link is None else link.run_name))


def _remember(series: Series, record: Mapping[str, Any]) -> None:
    for name, value in record.items():
        if isinstance(value, (int, float)):
            series.setdefault(name, {})[record["step"]] = value


def add_metric(figure: "Figure", name: str, points: Sequence[tuple[int, float]]) -> None:
    """Add the run's metric, which is not the loss, to the figure of the losses, on a second y-axis.

    Args:
        figure: figure of the losses.
        name: name of the metric.
        points: (step, value), ascending.
    """
    figure.subplots_adjust(right=0.91)  # leaves space for the labels of the second axis
    axes = figure.axes[0].twinx()
    steps, values = zip(*points, strict=True)
    axes.plot(steps, values, color=GREEN, linewidth=1.2, marker="s", markersize=4, label=f"{name} {_final(values)}")
    axes.spines["top"].set_visible(False)
    axes.set_ylabel(name, color=GREEN, parse_math=False)
    legend_above(figure.axes[0])


def loss_figure(
    points: Sequence[tuple[int, float]],
    held_out: Sequence[tuple[int, float]],
    entropy: float | None,
    run_name: str = "",
) -> "Figure":
    """Draw the training loss, its running median, the held-out loss and, for comparison, the unigram entropy.

    Args:
        points: (step, training loss), ascending.
        held_out: (step, held-out loss), ascending.
        entropy: entropy of the text's unigram distribution, in nats; None for other data.
        run_name: name of the run, shown under the title.
    """
    figure, axes = frame("Loss", None, "loss (mean over the global batch)", below=run_name)
    losses, held_out_losses = [loss for _, loss in points], [loss for _, loss in held_out]
    if points:
        draw_series(axes, points, raw=f"training, {RAW} {_final(losses)}", smooth=f"its {SMOOTHED}")
    if held_out:
        label = f"held out {_final(held_out_losses)}"
        axes.plot(
            [step for step, _ in held_out],
            held_out_losses,
            color=ORANGE,
            linewidth=1.2,
            marker="o",
            markersize=5,
            label=label,
        )
    if entropy is not None:
        axes.axhline(entropy, color=GREY, linestyle=":", linewidth=1.4, label=f"unigram entropy {entropy:.3f}")
    fit(axes, losses, held_out_losses + ([] if entropy is None else [entropy]))
    legend_above(axes)
    return figure


def _final(values: Sequence[float]) -> str:
    return f"{values[-1]:.4f}"
