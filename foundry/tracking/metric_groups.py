"""Metric names that trackers group by the part before the slash: train/loss, val/loss, perf/step_seconds.

Metrics in metrics.jsonl and in settings have names without groups.
"""

from typing import Any

from foundry.core.events import Evaluated, StepLogged
from foundry.tracking.metrics_file import evaluation_record, step_record

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


def step_name(name: str) -> str:
    """Return the grouped name of a logged step's field. Names with a slash, such as norms of blocks, stay unchanged."""
    if "/" in name or name == "step":
        return name
    return f"perf/{name}" if name in _PERFORMANCE else f"train/{name}"


def evaluation_name(name: str) -> str:
    """Return the grouped name of an evaluation's field: val/loss for val_loss."""
    if "/" in name or name in _CLOCK:
        return step_name(name)
    return f"val/{name.removeprefix('val_')}"


def best_name(name: str) -> str:
    """Return the grouped name of the best evaluation's metric: val/best_loss for val_loss."""
    return f"val/best_{name.removeprefix('val_')}"


def step_values(event: StepLogged) -> dict[str, Any]:
    """Return `step_record` of a logged step with grouped names; `step` has no group."""
    return {step_name(name): value for name, value in step_record(event).items()}


def evaluation_values(event: Evaluated) -> dict[str, Any]:
    """Return `evaluation_record` of an evaluation with grouped names."""
    return {evaluation_name(name): value for name, value in evaluation_record(event).items()}
