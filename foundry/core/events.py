"""Events that observers receive; no event is sent during an optimizer step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class PlannedUpdate:
    """Planned values of one optimizer step; a row of schedule.csv.

    Attributes:
        step: number of the step, counted from one.
        samples: samples consumed after the step.
    """

    step: int
    samples: int
    global_batch_size: int
    lr: float
    weight_decay: float


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Range of optimizer steps, counted from one, of one phase of a schedule: warmup, stable, decay, floor."""

    name: str
    first_step: int
    last_step: int


@dataclass(frozen=True, kw_only=True)
class RunStarted:
    """A run is about to take its first step, or its first step after a resume.

    Attributes:
        run_dir: the run directory.
        config: the composed configuration as plain containers.
        config_hash: SHA-256 of the configuration, in hexadecimal.
        plan: derived numbers: world_size, accum_freq, total_steps, total_samples, parameters, …
        updates: planned updates of the run, or a selection sufficient for plots.
        phases: phases of the learning rate.
        step: optimizer steps already taken by an earlier start of the same run.
        metric: name of the metric that is reported as the result of the run; None if `evaluation.metric` is not set.
        data: training data as `name`, `digest` and `source` (its location), or None.
        devices: devices of all ranks, for display: "NVIDIA H100 80GB HBM3 x 8", or "cpu, 2 threads".
    """

    run_dir: Path
    config: dict[str, Any]
    config_hash: str
    plan: dict[str, Any]
    updates: Sequence[PlannedUpdate] = ()
    phases: Sequence[Phase] = ()
    step: int = 0
    metric: str | None = "val_loss"
    data: dict[str, str] | None = None
    devices: str = ""


@dataclass(frozen=True, kw_only=True)
class StepLogged:
    """Optimizer step `step` is done; one line of metrics.jsonl.

    Attributes:
        loss: loss over this step's global batch.
        step_seconds: mean duration of a step since the last logged one.
        tflops: achieved TFLOP/s per rank; None if the model does not define its FLOPs.
        mfu: fraction of the device's peak FLOP/s; None if the peak or `tflops` is unknown.
        peak_memory_bytes: peak memory of tensors on this rank's GPU in this run; on a CPU, peak memory of the process.
        reserved_memory_bytes: peak memory that torch reserved on this rank's GPU, with torch's cache; None on a CPU.
        allocator_retries: how many times this rank's GPU ran full and torch had to free its cache; None on a CPU.
        metrics: metrics of the objective, averaged over the global batch.
    """

    step: int
    samples: int
    tokens: int | None
    epoch: float
    loss: float
    lr: float
    weight_decay: float
    grad_norm: float
    global_batch_size: int
    samples_per_second: float
    tokens_per_second: float | None
    step_seconds: float
    tflops: float | None
    mfu: float | None
    peak_memory_bytes: int
    reserved_memory_bytes: int | None = None
    allocator_retries: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The model was evaluated on held-out data after step `step`.

    Attributes:
        metrics: metrics by their names in metrics.jsonl: `val_loss`, `val_accuracy`.
        samples_file: file of generated samples (image or text), if any.
    """

    step: int
    samples: int
    metrics: dict[str, float] = field(default_factory=dict)
    samples_file: Path | None = None


@dataclass(frozen=True, kw_only=True)
class RunEnded:
    """A run has ended.

    Attributes:
        state: finished, paused, stopped, requeued or failed.
        reason: reason in one line; empty if the run finished all its steps.
        result: content of result.json; empty unless the run finished or paused.
    """

    state: str
    reason: str
    result: dict[str, Any]


class Observer(Protocol):
    """Receives the events of a run on rank 0, in order. It must log its own errors: an exception would end the run.

    Only the observer that writes the result of a finished run raises, since without a result the run is not finished.
    """

    def on_start(self, event: RunStarted) -> None:
        """Handle the start of the run."""

    def on_step(self, event: StepLogged) -> None:
        """Handle a logged step."""

    def on_evaluation(self, event: Evaluated) -> None:
        """Handle an evaluation."""

    def on_end(self, event: RunEnded) -> None:
        """Handle the end of the run, and release all resources."""
