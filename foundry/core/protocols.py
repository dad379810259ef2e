"""Protocols of the trainer's parts, and the contexts that parts receive."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

from foundry.core.moved_modules import find_moved
from foundry.core.progress import Progress

if TYPE_CHECKING:
    from foundry.checkpoint.resume_point import ResumePoint
    from foundry.config.schemas.root import Config
    from foundry.data.splits import DataSplits
    from foundry.generation.scoring import Judge
    from foundry.parallel.precision import PrecisionPolicy
    from foundry.parallel.process_group import World

__getattr__ = find_moved(__name__)

Microbatch = dict[str, Tensor]
"""One rank's share of one forward pass; the first dimension of every tensor is the sample.

`position`: (batch,) int64, always in host memory: each sample's position in the global order, the key of its random
numbers; -1 marks padding, a sample that is ignored in sums and counts.

With packing, the first dimension of some tensors is the packed row instead. `documents` is then the sample index of
each token, `document_starts`, (entries,) int32, the start of each sample in the flattened rows, and `longest_document`,
() int64 in host memory, an upper bound of the sample lengths.

If samples share prefixes, there is a single row. `documents` is -1 for the shared tokens, which come first, and
`prefix_lengths`, (prefixes,), and `branches`, (samples, 2), both int64 in host memory, are the arguments of
`foundry.models.attention.branches.Branches`.
"""

HOST_ENTRIES = frozenset({"position", "longest_document", "prefix_lengths", "branches"})
"""Names of the microbatch tensors that stay in host memory, so that reading them does not wait for the device."""


@dataclass(frozen=True)
class Mean:
    """A metric as a sum with its own count, such as rewards per sequence or a divergence per token.

    Attributes:
        sum: () float32.
        count: number of items in the sum, a whole number; () if it is a tensor; None uses the number of valid items of
            the loss.
    """

    sum: Tensor
    count: Tensor | int | None = None


@dataclass(frozen=True)
class LossSum:
    """Loss and metrics of one microbatch, returned by an objective.

    Attributes:
        loss: () float32, summed over the valid items; exactly 0 if there are none, never NaN.
        metrics: metrics, logged as sum / count over the whole global batch, or over the validation split.
    """

    loss: Tensor
    metrics: dict[str, Mean] = field(default_factory=dict)


class Samples(Protocol):
    """Samples for people to look at: generated images or continued text."""

    def save(self, stem: Path) -> Path:
        """Write to `stem` with the suffix of the format (.png, .txt) and return the file."""
        ...


class Objective(ABC):
    """Base class of objectives: the loss that a run minimizes.

    An objective returns a sum over valid items, and the trainer divides it by their number over the whole global batch.
    Subclasses implement `num_valid` and `loss`; every other attribute and method has a default. An optional method is
    None if the objective lacks it, so callers check `objective.generate is not None`.
    """

    metrics: tuple[str, ...] | None = None
    """Names of the metrics in `LossSum`; a microbatch may lack any of them. Settings that select a metric of another
    name are refused before the first step. None: every microbatch of every rank has the same metrics."""

    reads_log_probs: bool = False
    """If True, every model returns `foundry.models.token_log_probs.TokenLogProbs`, including models that return logits.
    Read from the class."""

    asks_for_loss: bool = False
    """If True, the model sums the loss over tokens, with `foundry.models.token_loss`. Read from the class."""

    forward_keywords: tuple[str, ...] = ()
    """Keyword arguments passed to the model; a model whose forward() lacks one is refused before the first step."""

    frozen_models: Mapping[str, Any] = MappingProxyType({})
    """Frozen models passed to `compare`, such as a reference or a teacher: by name, a configuration with `_target_`, or
    None for a copy of the run's model with the initial weights of the run."""

    columns: tuple[str, ...] = ()
    """Names of the values that `precompute` returns. With columns, the frozen models run once on every sample before
    the first step and are then freed; microbatches contain the columns under these names."""

    makes_samples: bool = False
    """If True, the model makes the samples in the windows of `build_source`, with the shapes of `example`. Then the
    loss does not rank learning rates."""

    recorded_models: tuple[str, ...] = ()
    """Names of the frozen models that the source of windows calls while it makes samples, with gathered weights."""

    compare: Callable[[Mapping[str, nn.Module]], None] | None = None
    """Take the frozen models by name, before the first step. The objective calls them like the run's model, with its
    precision. They are in eval mode, need no gradients, and are sharded if the run's model is, so every rank must call
    them together."""

    generate: Callable[..., Samples] | None = None
    """Generate samples: `generate(model, data, device, **options)`, with the objective's own options. Every rank calls
    it and gets the same result."""

    predict: Callable[[nn.Module, Microbatch], tuple[Tensor, Tensor]] | None = None
    """Return predictions and targets of the valid items of a microbatch, for metrics of torchmetrics: (items, classes)
    scores or (items, ...) values; and (items,) int64 classes or (items, ...) values."""

    build_source: "Callable[[SourceContext], WindowSource] | None" = None
    """Return a source of this rank's windows that replaces the loader of the training data."""

    @abstractmethod
    def num_valid(self, microbatch: Microbatch) -> int:
        """Return the number of valid items; called before the forward pass, with the microbatch in host memory."""

    @abstractmethod
    def loss(self, model: nn.Module, microbatch: Microbatch) -> LossSum:
        """Call the model and return the loss summed over the valid items, with metrics."""

    def precompute(self, microbatch: Microbatch) -> dict[str, Tensor]:
        """Return the columns of a microbatch, (batch, ...) each; called without gradients, after `compare`.

        Raises:
            NotImplementedError: the objective declares `columns` but does not override this method.
        """
        raise NotImplementedError(f"{type(self).__name__} declares columns but does not implement precompute()")

    def example(self, num_samples: int, seq_len: int) -> Microbatch:
        """Return a microbatch of made samples with the shapes of training, used for planning."""
        tokens = torch.zeros(num_samples, seq_len, dtype=torch.int64)
        return {"tokens": tokens, "targets": tokens, "position": torch.arange(num_samples)}

    def bytes_for_samples(self, model: nn.Module, seq_len: int, element_size: int) -> int | None:
        """Return the bytes that a rank needs to make samples, without weights; None if unknown.

        Args:
            model: the unwrapped model, which may have fake parameters.
            seq_len: tokens of the longest sample.
            element_size: bytes of a number in the compute type.
        """
        return 0


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Context that all parts of a run share; built once on each rank.

    Attributes:
        config: configuration of the run.
        config_hash: hash of the configuration.
        world: process group of the run: `dp_rank`, `dp_size`, `device`, `is_main`, `dp_sum`.
        precision: precision policy of the run.
        data: training and validation samples.
        judge: scores completions; None if the run has no environment.
        run_dir: output directory of rank 0.
        resume_point: checkpoint to resume from; None for a new run.
        on_activity: called with the optimizer step and the name of each activity that begins; None to call nothing.
        heartbeat: called with the name of the next activity; the watchdog ends a process that stops calling it.
    """

    config: "Config"
    config_hash: str
    world: "World"
    precision: "PrecisionPolicy"
    data: "DataSplits"
    judge: "Judge | None"
    run_dir: Path
    resume_point: "ResumePoint | None" = None
    on_activity: Callable[[int, str], None] | None = None
    heartbeat: Callable[[str], None] = lambda activity: None

    @classmethod
    def of(cls, run: "RunContext", **attributes: Any) -> Self:
        """Return a context with the attributes of `run`; `attributes` replace or extend them."""
        return cls(**{**vars(run), **attributes})

    @property
    def beat(self) -> Callable[[str], None]:
        """Earlier name of `heartbeat`."""
        return self.heartbeat

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return self.config.hparams.seed

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context manager for forward passes with the precision of the run."""
        return self.precision.autocast(self.world.device)


@dataclass(frozen=True, kw_only=True)
class SourceContext(RunContext):
    """Context of an objective that builds its own source of windows.

    Attributes:
        model: the wrapped model.
        batch_size_at: returns the global batch size after a number of consumed samples.
        build_loader: builds a loader of the training data in the global order; the argument selects all samples on
            every rank (True) or this rank's share (False).
        frozen: frozen models of the objective, by name.
        pack_tokens: tokens of a packed row; None gives each sample its own row.
    """

    model: nn.Module
    batch_size_at: Callable[[int], int]
    build_loader: "Callable[[bool], WindowSource]"
    frozen: Mapping[str, nn.Module] = field(default_factory=dict)
    pack_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluationContext(RunContext):
    """Context of an evaluator: the run, the step, and the output files.

    Attributes:
        step: optimizer steps taken.
        folder: output folder of rank 0 for files such as samples; may not exist yet.
        files: files that evaluators wrote and appended here; observers receive the first.
    """

    step: int
    folder: Path
    files: list[Path] = field(default_factory=list)


class Evaluator(Protocol):
    """Evaluates a model during a run, on the validation split, with a benchmark or in a simulator.

    If an evaluator has `metrics`, the names of its metrics, or its configuration lists them under that key, settings
    that select another metric are refused at the start. If it has `close()`, which frees resources such as simulators,
    that method is called at the end of the run.
    """

    def evaluate(self, model: nn.Module, context: EvaluationContext) -> Mapping[str, float]:
        """Evaluate the model, which is in eval mode, without gradients, and has the averaged weights if they are kept.

        Every rank calls this and returns the same values. Use separate random generators, since training continues with
        the global ones. The metric `accuracy` is called `val_accuracy` in metrics.jsonl and in settings.
        """
        ...


class StopRule(Protocol):
    """A rule that may stop a run after an evaluation; every rank passes the same metrics and gets the same result."""

    def update(self, metrics: Mapping[str, float], epoch: int, share: float) -> str | None:
        """Update with an evaluation.

        Args:
            metrics: metrics by their names in metrics.jsonl.
            epoch: epoch of the evaluated step's first sample, counted from 0.
            share: fraction of the run completed, from 0 to 1.

        Returns:
            The reason to stop the run, or None to continue.
        """
        ...

    def result(self) -> dict[str, Any]:
        """Return entries for result.json, as plain JSON."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as plain JSON."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`."""
        ...


@dataclass(frozen=True)
class Window:
    """This rank's microbatches of one global batch, in host memory.

    Attributes:
        microbatches: microbatches in execution order; the same number on every rank.
        num_samples: samples of the whole global batch, over all ranks.
        num_tokens: tokens of the whole global batch, over all ranks; None if samples are not sequences of tokens.
        metrics: metrics of the source, equal on all ranks, such as the mean reward of a rollout; logged with the step.
    """

    microbatches: Sequence[Microbatch]
    num_samples: int
    num_tokens: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class WindowSource(Protocol):
    """Source of windows of microbatches; it keeps its own position in the data."""

    def next_window(self) -> Window:
        """Return this rank's share of the next global batch."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data; any number of ranks can continue from it in the same order."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position that `state_dict` returned."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return tensors of the position, equal on all ranks; a checkpoint stores them as `source.<name>`."""
        ...

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `tensors()`, in host memory; called after `load_state_dict`."""
        ...

    def rewind(self, samples: int) -> None:
        """Reset the sample counter to `samples`, but continue to read after the last sample read."""
        ...


class Schedule(Protocol):
    """Learning rate and weight decay as pure functions of the samples consumed."""

    def lr(self, samples_before: int, samples_after: int) -> float:
        """Return the learning rate of the update that consumes samples `samples_before` to `samples_after`."""
        ...

    def weight_decay(self, samples_before: int, samples_after: int) -> float | None:
        """Return the weight decay of the update, as in `lr`; None keeps the optimizer's setting."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's parameters as plain JSON, so that a resumed run can detect a changed schedule."""
        ...


@runtime_checkable
class HasMomentum(Protocol):
    """A schedule that can also set the momentum."""

    def momentum(self, samples_before: int, samples_after: int) -> float | None:
        """Return the momentum of the update, as in `Schedule.lr`; None keeps the optimizer's setting."""
        ...


def scheduled_momentum(schedule: Schedule, samples_before: int, samples_after: int) -> float | None:
    """Return the momentum of an update; None if the schedule does not set it."""
    if not isinstance(schedule, HasMomentum) or not callable(schedule.momentum):  # it may be a setting of the schedule
        return None
    return schedule.momentum(samples_before, samples_after)


@runtime_checkable
class HasPhases(Protocol):
    """A schedule with named phases, which the plan, the terminal and the plots show."""

    def phases(self) -> list[tuple[str, float]]:
        """Return name and end of each phase of the learning rate, in order; the end is a number of samples."""
        ...


class SaveError(RuntimeError):
    """A checkpoint could not be written; raised on every rank."""


class CheckpointManager(Protocol):
    """Saves and restores checkpoints of a run; all ranks call every method together, except `is_time`."""

    def is_time(self) -> bool:
        """Return True once each time a checkpoint is due by the clock of rank 0; always False on other ranks."""
        ...

    def is_due(self, step: int, samples_before: int, samples_after: int, tokens: tuple[int, int] | None = None) -> bool:
        """Return True if a checkpoint is due by the interval in the settings; arguments as in `Interval.due`."""
        ...

    def check_state(self) -> None:
        """Check once, after an update, that the state can be saved.

        Raises:
            ConfigError: the state cannot be saved.
        """
        ...

    def save(
        self,
        progress: Progress,
        state: dict[str, Any],
        tensors: Mapping[str, Tensor],
        *,
        metric: float | None,
        is_best: bool,
        wait: bool,
    ) -> Path | None:
        """Save the run with the trainer's state and return the checkpoint's folder; None if checkpoints are off.

        Args:
            progress: counters of steps, samples and tokens.
            state: state of the trainer as plain JSON, equal on all ranks.
            tensors: tensors of the source of windows, equal on all ranks.
            metric: metric of an evaluation at this step; None without an evaluation.
            is_best: True if the metric is the best so far.
            wait: return only after the checkpoint is on disk.

        Raises:
            SaveError: `wait` is True and the checkpoint could not be written, or with `checkpoint.strict_saves` an
                earlier one.
        """
        ...

    def finish(self) -> None:
        """Wait until all checkpoints are on disk.

        Raises:
            SaveError: the last checkpoint could not be written.
        """
        ...

    def close(self) -> None:
        """Release the manager at the end of the run without a collective, since other ranks may be gone."""
        ...

    def roll_back(self) -> dict[str, Any] | None:
        """Load weights and optimizers from the newest intact checkpoint, if any; return its trainer state, or None."""
        ...


class Synchroniser(Protocol):
    """Policy of gradient synchronization: selects the backward passes that reduce gradients over ranks."""

    def microbatch(self, *, first: bool, last: bool) -> Any:
        """Return a context manager for the forward and backward pass of one microbatch of the window."""
        ...

    def finish(self) -> None:
        """Reduce the gradients that the wrapper does not reduce, after the window's last backward pass."""
        ...
