"""Metric names that trackers group by the part before the slash: train/loss, val/loss, perf/step_seconds.

Metrics in metrics.jsonl and in settings have names without groups. A run that an earlier version of foundry began in a
tracker keeps names without groups there, so that its curves continue.
"""

from pathlib import Path
from typing import Any

from foundry.core.events import Evaluated, StepLogged
from foundry.tracking.metrics_file import evaluation_record, step_record

FLAT, GROUPED = "flat", "grouped"
"""Styles of metric names in a tracker: as in metrics.jsonl, or with groups."""

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
_CLOCK = ("step", "samples")  # fields of both logged steps and evaluations
_MARKER = ".grouped_metrics"


def step_name(name: str) -> str:
    """Return the grouped name of a logged step's field. Names with a slash, such as norms of blocks, stay unchanged."""
    if "/" in name or name == "step":
        return name
    return f"perf/{name}" if name in _PERFORMANCE else f"train/{name}"


def evaluation_name(name: str) -> str:
    """Return the grouped name of an evaluation's field: val/loss for val_loss, train/samples for samples."""
    if "/" in name or name in _CLOCK:
        return step_name(name)
    return f"val/{name.removeprefix('val_')}"


def best_name(name: str) -> str:
    """Return the grouped name of the best evaluation's metric: val/best_loss for val_loss."""
    return f"val/best_{name.removeprefix('val_')}"


def step_values(event: StepLogged, *, is_grouped: bool) -> dict[str, Any]:
    """Return `step_record` of a logged step, with grouped names if `is_grouped`; `step` has no group."""
    record = step_record(event)
    return {step_name(name): value for name, value in record.items()} if is_grouped else record


def evaluation_values(event: Evaluated, *, is_grouped: bool) -> dict[str, Any]:
    """Return `evaluation_record` of an evaluation, with grouped names if `is_grouped`."""
    record = evaluation_record(event)
    return {evaluation_name(name): value for name, value in record.items()} if is_grouped else record


def uses_grouped_names(folder: Path) -> bool:
    """Return True if the metrics in a tracker's folder have grouped names. Marks an empty folder as grouped.

    Args:
        folder: the tracker's folder, created if it does not exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        (folder / _MARKER).touch()
    return (folder / _MARKER).exists()
