"""Names of metrics that trackers group by the part before the slash: train/loss, val/loss, perf/step_seconds.

Metrics in metrics.jsonl and in settings have names without groups. A run that an earlier version began with these names
in a tracker continues with them there, so that each curve stays whole.
"""

from pathlib import Path
from typing import Any

from foundry.core.events import Evaluated, StepLogged
from foundry.tracking.metrics_file import evaluation_record, step_record

FLAT, GROUPED = "flat", "grouped"
"""Styles of names in a tracker: as in metrics.jsonl, or in groups."""

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
    """Return the group name of a logged step's field; a name with a slash, such as the norm of a block, stays."""
    if "/" in name or name == "step":
        return name
    return f"perf/{name}" if name in _PERFORMANCE else f"train/{name}"


def evaluation_name(name: str) -> str:
    """Return the group name of an evaluation's field: val/loss for val_loss."""
    if "/" in name or name in _CLOCK:
        return step_name(name)
    return f"val/{name.removeprefix('val_')}"


def best_name(name: str) -> str:
    """Return the group name of the best evaluation's metric: val/best_loss for val_loss."""
    return f"val/best_{name.removeprefix('val_')}"


def step_values(event: StepLogged, *, is_grouped: bool) -> dict[str, Any]:
    """Return a logged step as `step_record` does, with group names if asked; `step` has no group."""
    record = step_record(event)
    return {step_name(name): value for name, value in record.items()} if is_grouped else record


def evaluation_values(event: Evaluated, *, is_grouped: bool) -> dict[str, Any]:
    """Return an evaluation as `evaluation_record` does, with group names if asked."""
    record = evaluation_record(event)
    return {evaluation_name(name): value for name, value in record.items()} if is_grouped else record


def begins_grouped(folder: Path) -> bool:
    """Whether the metrics in a tracker's folder have group names; an empty or new folder is marked to have them.

    Args:
        folder: made if it does not exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        (folder / _MARKER).touch()
    return (folder / _MARKER).exists()
