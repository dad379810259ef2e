"""Figure plots/metrics.png: gradient norm, learning rate, throughput, and metrics of the objective and evaluators."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from foundry.config.metrics import LOSS, val_metric_name
from foundry.core.tasks import plots
from foundry.tracking.plot_style import ORANGE, RED, count_steps, draw_series, fit, head, panels, scale_logarithmically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COMMON_METRICS = {
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "tokens_per_second": "tokens/s",
    "samples_per_second": "samples/s",
    "allocator_retries": "allocator retries",
}
_EXCLUDED = {"step", "samples", "tokens", "epoch", "loss", "weight_decay", "global_batch_size", "step_seconds"}
_EXCLUDED |= {"tflops", "mfu", "peak_memory_bytes", "reserved_memory_bytes", LOSS}
"""Metrics without a panel: they are in other figures, or repeat a curve in another unit."""
_MOST_PANELS = 12
_WIDE = 30.0  # ratio of the largest to the smallest gradient norm that makes the axis logarithmic
_HELD_OUT = "held out"

Points = Sequence[tuple[int, float]]


def metrics_figure(
    logged: Mapping[str, Mapping[int, float]], measured: Mapping[str, Mapping[int, float]], run_name: str = ""
) -> "Figure | None":
    """Draw a panel for each metric that changes during the run, at most 12 panels.

    Args:
        logged: training metrics by name in metrics.jsonl, each as value by step.
        measured: evaluation metrics in the same form; `val_NAME` shares the panel of the training metric NAME.
        run_name: name of the run, shown under the title.

    Returns:
        The figure; None if no metric changes.
    """
    names = [name for name in _choose(logged, measured) if _changes(logged.get(name), measured.get(_counterpart(name)))]
    if not names:
        return None
    figure, axes_list = panels(len(names[:_MOST_PANELS]))
    for axes, name in zip(axes_list, names, strict=False):
        training, held_out = sorted(logged.get(name, {}).items()), sorted(measured.get(_counterpart(name), {}).items())
        _draw(axes, name, training, held_out)
    num_hidden = len(names) - _MOST_PANELS
    text = run_name if num_hidden <= 0 else f"{run_name} ({num_hidden} more in metrics.jsonl)"
    handles = {handle.get_label(): handle for axes in axes_list for handle in axes.get_legend_handles_labels()[0]}
    legend_handles = [handle for label, handle in handles.items() if not str(label).startswith("not finite")]
    head(figure, "Metrics", text, handles=legend_handles)
    return figure


def _choose(logged: Mapping[str, object], measured: Mapping[str, object]) -> list[str]:
    """Return the names of the panels: metrics of every run, other training metrics, evaluation-only metrics."""
    excluded = _EXCLUDED.union(*(plot.metrics for plot in plots().values()))
    training = [name for name in logged if name not in _COMMON_METRICS and name not in excluded and "/" not in name]
    counterparts = {_counterpart(name) for name in training}
    evaluation_only = [name for name in measured if name not in counterparts and name not in excluded]
    return [*(name for name in _COMMON_METRICS if name in logged), *training, *evaluation_only]


def _counterpart(name: str) -> str:
    """Return the evaluation name of a training metric. Evaluation metrics keep their name."""
    return name if name.startswith("val_") else val_metric_name(name)


def _changes(*series: Mapping[int, float] | None) -> bool:
    """Return True if a series has more than one distinct value, or a value that is not finite."""
    return any(
        len(set(values.values())) > 1 or not all(map(math.isfinite, values.values())) for values in series if values
    )


def _draw(axes: "Axes", name: str, training: Points, held_out: Points) -> None:
    axes.set_title(_COMMON_METRICS.get(name, name), loc="left", fontsize="medium", parse_math=False)
    count_steps(axes)
    if training:
        draw_series(axes, training)
    if held_out:
        steps, measured = zip(*held_out, strict=True)
        axes.plot(steps, measured, color=ORANGE, linewidth=1.2, marker="o", markersize=4, label=_HELD_OUT)
    values = [value for _, value in training]
    finite = [value for value in values if math.isfinite(value)]
    if name == "grad_norm" and finite and 0 < min(finite) < max(finite) / _WIDE:
        scale_logarithmically(axes)
    else:
        fit(axes, values, [value for _, value in held_out])
    if name == "lr":
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if num_non_finite := len(values) - len(finite):
        axes.set_title(f"{num_non_finite} not finite", loc="right", fontsize="medium", color=RED)
