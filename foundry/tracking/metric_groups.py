"""Names of metrics that trackers group by the part before the slash: train/loss, val/loss, perf/step_seconds.

In metrics.jsonl, and in settings that choose a metric, names stay as they are. A run that was begun with those names in
a tracker continues with them there, so that no curve is in two halves.
"""

from pathlib import Path
from typing import Any

from foundry.tracking.metrics_file import evaluation_record, step_record
from foundry.training.events import Evaluated, StepLogged

FLAT, GROUPED = "flat", "grouped"
"""Names as in metrics.jsonl, which trackers had at first; names in groups."""

_PERFORMANCE = frozenset(
    {
        "step_seconds",
        "tokens_per_second",
        "samples_per_second",
        "tflops",
        "mfu",
        "peak_memory_bytes",
        "reserved_memory_bytes",
        "allocator_retries",
    }
)
_CLOCK = ("step", "samples")  # of logged steps and of evaluations
_MARKER = ".grouped_metrics"


def step_name(name: str) -> str:
    """The name of a logged step's field in its group; one with a slash, such as the norm of a block, has its own."""
    if "/" in name or name == "step":
        return name
    return f"perf/{name}" if name in _PERFORMANCE else f"train/{name}"


def evaluation_name(name: str) -> str:
    """Likewise of an evaluation's field: val_loss is val/loss."""
    if "/" in name or name in _CLOCK:
        return step_name(name)
    return f"val/{name.removeprefix('val_')}"


def best_name(name: str) -> str:
    """Likewise of the best evaluation's metric: val_loss is val/best_loss."""
    return f"val/best_{name.removeprefix('val_')}"


def step_values(event: StepLogged, *, is_grouped: bool) -> dict[str, Any]:
    """A logged step as `step_record`, with names in groups, or with those of metrics.jsonl; `step` keeps its own."""
    record = step_record(event)
    return {step_name(name): value for name, value in record.items()} if is_grouped else record


def evaluation_values(event: Evaluated, *, is_grouped: bool) -> dict[str, Any]:
    """Likewise an evaluation."""
    record = evaluation_record(event)
    return {evaluation_name(name): value for name, value in record.items()} if is_grouped else record


def begins_grouped(folder: Path) -> bool:
    """Whether a tracker's folder in a run directory has names in groups; an empty or new one is marked to have them.

    Args:
        folder: made if it does not exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        (folder / _MARKER).touch()
    return (folder / _MARKER).exists()
