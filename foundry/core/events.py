"""The events that observers get, at step boundaries only."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class PlannedUpdate:
    """What one optimizer step will use; a row of schedule.csv.

    Attributes:
        step: counted from one.
        samples: consumed when it is done.
    """

    step: int
    samples: int
    global_batch_size: int
    lr: float
    weight_decay: float


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Optimizer steps, counted from one, through which a schedule does one thing: warmup, stable, decay, floor."""

    name: str
    first_step: int
    last_step: int


@dataclass(frozen=True, kw_only=True)
class RunStarted:
    """A run is about to take its first step.

    Attributes:
        run_dir: the run directory.
        config: the composed configuration as plain containers.
        config_hash: its SHA-256, in hexadecimal.
        plan: derived numbers: world_size, accum_freq, total_steps, total_samples, parameters, …
        updates: what the run's updates will use, or a selection that shows it.
        phases: of the learning rate.
        step: optimizer steps taken before, by an earlier start of the same run.
        metric: of an evaluation, by which the run is judged; None: by none.
        data: what is learnt from: None, or `name`, `digest` and `source`, where it lies.
        devices: of all ranks, for people: "NVIDIA H100 80GB HBM3 x 8", or "cpu, 2 threads".
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
        loss: of this step's whole global batch.
        step_seconds: mean duration of a step since the last logged one.
        tflops: achieved TFLOP/s per rank; None where the model does not say its FLOPs.
        mfu: share of the device's peak; None where the peak is unknown.
        peak_memory_bytes: most memory in tensors on this rank's GPU in this run; on a CPU, of the process.
        reserved_memory_bytes: most that torch has taken from that GPU, its cache included; None on a CPU.
        allocator_retries: how often that GPU was full until torch gave its cache back; None on a CPU.
        metrics: the objective's own, averaged over the global batch.
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
    """The model was measured on held-out data after step `step`.

    Attributes:
        metrics: by their names in metrics.jsonl: `val_loss`, `val_accuracy`.
        samples_file: the picture or text drawn, if any.
    """

    step: int
    samples: int
    metrics: dict[str, float] = field(default_factory=dict)
    samples_file: Path | None = None


@dataclass(frozen=True, kw_only=True)
class RunEnded:
    """A run is over.

    Attributes:
        state: finished, stopped, requeued or failed.
        reason: why, in one line; empty for finished.
        result: what result.json holds; empty for failed.
    """

    state: str
    reason: str
    result: dict[str, Any]


class Observer(Protocol):
    """Gets the events of a run on rank 0, in order. An observer never stops a run: what it cannot do it logs.

    The one exception is the result of a finished run, without which it is not finished.
    """

    def on_start(self, event: RunStarted) -> None:
        """The run begins."""

    def on_step(self, event: StepLogged) -> None:
        """A logged step is done."""

    def on_evaluation(self, event: Evaluated) -> None:
        """An evaluation is done."""

    def on_end(self, event: RunEnded) -> None:
        """The run is over; release everything."""
