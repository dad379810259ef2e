"""Protocols of the parts that the trainer is given, and the contexts that parts get."""

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
    from foundry.environments.judge import Judge
    from foundry.parallel.precision import PrecisionPolicy
    from foundry.parallel.process_group import World

__getattr__ = find_moved(__name__)

Microbatch = dict[str, Tensor]
"""One rank's share of one forward pass; the first dimension of every tensor is the sample.

`position`: (batch,) int64, always in host memory: each sample's place in the global order. Randomness is keyed by it,
and -1 marks padding, a sample that counts for nothing.

If samples share rows, the first dimension of some is the row instead. `documents` has the sample of each token,
`document_starts`, (entries,) int32, where these begin in the flattened rows, and `longest_document`, () int64 and in
host memory, an upper bound of their length.
"""

HOST_ENTRIES = frozenset({"position", "longest_document"})
"""Names of a microbatch's tensors that stay in host memory, where a number can be read without waiting for a device."""


@dataclass(frozen=True)
class Mean:
    """A metric as a sum with its own count, such as rewards by sequence or a divergence by token.

    Attributes:
        sum: () float32.
        count: of the items in it, a whole number, () where it is a tensor; None: the valid items of the loss.
    """

    sum: Tensor
    count: Tensor | int | None = None


@dataclass(frozen=True)
class LossSum:
    """What an objective makes of one microbatch.

    Attributes:
        loss: () float32, summed over the valid items; exactly 0 where there are none, never NaN.
        metrics: logged as sum / count over the whole global batch, or over the held-out data.
    """

    loss: Tensor
    metrics: dict[str, Mean] = field(default_factory=dict)


class Samples(Protocol):
    """Something a person can look at: drawn images or continued text."""

    def save(self, stem: Path) -> Path:
        """Write to `stem` with a suffix of the kind's own (.png, .txt) and return the file."""
        ...


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Prompts with what the model has made of them, in host memory; completions of one prompt follow each other.

    Attributes:
        tokens: (completions, seq) int64, a prompt and its completion, padded on the right.
        targets: (completions, seq) int64, the same one token later, -100 where that is no token of the completion.
        group: (completions,) int64, the number of the prompt.
        rewards: (completions,) float64, NaN where an answer could not be scored, or nothing scores answers.
        is_truncated: (completions,) bool, whether a completion did not end by itself.
        sampler: (completions, seq) float32, the log-probability with which a target was drawn; 0 where there is none.
        recorded: (completions, seq) float32 by name, what the objective has recorded.
    """

    tokens: Tensor
    targets: Tensor
    group: Tensor
    rewards: Tensor
    is_truncated: Tensor
    sampler: Tensor
    recorded: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """What an objective makes of a rollout before it learns from it.

    Attributes:
        columns: (completions, ...) each, which microbatches have besides `tokens`, `targets` and `position`.
        metrics: logged with each of the rollout's updates.
    """

    columns: Mapping[str, Tensor]
    metrics: Mapping[str, float] = field(default_factory=dict)


class Objective(ABC):
    """Base class of objectives: the loss that a run minimises.

    An objective returns a sum over valid items, and the run divides it by their number over the whole global batch. A
    subclass has `num_valid` and `loss`. Every other attribute and method has a default. An optional method is None if
    the objective lacks it, so that callers ask `objective.generate is not None`.
    """

    metrics: tuple[str, ...] | None = None
    """Names of the metrics in `LossSum`. Any of them may be missing from a microbatch, and settings that choose another
    name are refused before the first step. None: every microbatch of every rank has the same metrics."""

    reads_log_probs: bool = False
    """Whether every model returns `foundry.models.token_log_probs.TokenLogProbs`, also a model of logits. Read from the
    class."""

    asks_for_loss: bool = False
    """Whether the model sums the loss over tokens, by `foundry.models.token_loss`. Read from the class."""

    forward_keywords: tuple[str, ...] = ()
    """Keywords with which the model is called; a model whose forward() lacks one is refused before the first step."""

    frozen_models: Mapping[str, Any] = MappingProxyType({})
    """Models that do not learn, such as a reference or a teacher, which `compare` takes: by name, a configuration with
    `_target_`, or None for a copy of the run's model with the weights with which the run started from scratch."""

    columns: tuple[str, ...] = ()
    """Names of the values that `precompute` returns. With columns the frozen models are called once for every sample,
    before the first step, and do not stay in memory; microbatches have the columns under these names."""

    rollouts: Any = None
    """Settings of the completions to learn from, a `foundry.config.schemas.rollouts.Rollouts`; the run then calls
    `record`, `prepare` and `example`. None: the objective learns from the samples of the data."""

    recorded_models: tuple[str, ...] = ()
    """Names of the frozen models that `record` calls; their weights are gathered for it."""

    compare: Callable[[Mapping[str, nn.Module]], None] | None = None
    """Take the frozen models by name, before the first step. Such a model is called like the run's model, in the run's
    arithmetic. It is in evaluation mode, its parameters need no gradients, and it is sharded if the run's model is, so
    every rank calls it together with the others."""

    generate: Callable[..., Samples] | None = None
    """Draw samples: `generate(model, data, device, **options)`, with the objective's own options. Every rank calls it
    together, with the same result."""

    predict: Callable[[nn.Module, Microbatch], tuple[Tensor, Tensor]] | None = None
    """Return predictions and targets of the valid items of a microbatch, for metrics of torchmetrics: (items, classes)
    scores or (items, ...) values; and (items,) int64 classes or (items, ...) values."""

    build_source: "Callable[[SourceContext], WindowSource] | None" = None
    """Return a source of this rank's windows, in place of the one that reads the training data."""

    @abstractmethod
    def num_valid(self, microbatch: Microbatch) -> int:
        """Return the number of valid items, before the forward pass; the microbatch is still in host memory."""

    @abstractmethod
    def loss(self, model: nn.Module, microbatch: Microbatch) -> LossSum:
        """Call the model and sum the loss over the valid items."""

    def precompute(self, microbatch: Microbatch) -> dict[str, Tensor]:
        """Return the columns of a microbatch, (batch, ...) each; called without gradients, after `compare`.

        Raises:
            NotImplementedError: the objective has `columns` and no method to compute them.
        """
        raise NotImplementedError(f"{type(self).__name__} has columns, and no precompute()")

    def record(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return values of the models before a rollout's first update, (rows, seq) by name.

        The method is called without gradients, in evaluation mode, as often as there are completions of this rank.
        """
        return {}

    def prepare(self, rollout: Rollout) -> Prepared:
        """Return the values that the updates need of a whole rollout, such as advantages; the same on every rank."""
        return Prepared({})

    def example(self, num_samples: int, seq_len: int) -> Microbatch:
        """Return a microbatch of completions with the shapes of training, for a plan."""
        tokens = torch.zeros(num_samples, seq_len, dtype=torch.int64)
        return {"tokens": tokens, "targets": tokens, "position": torch.arange(num_samples)}


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The run, as all of its parts share it; built once on each rank.

    Attributes:
        config: of the run.
        config_hash: of the same.
        world: this rank and the others: `dp_rank`, `dp_size`, `device`, `is_main`, `dp_sum`.
        precision: the arithmetic of the run.
        data: training and held-out samples.
        judge: scores answers; None if the run has no environment.
        run_dir: where rank 0 writes.
        resume_point: the checkpoint from which the run resumes; None: it starts from scratch.
        on_activity: called with the optimizer step and the name of each activity that begins.
        beat: names the next activity to the watchdog, which ends a process that is silent for too long.
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
    beat: Callable[[str], None] = lambda doing: None

    @classmethod
    def of(cls, run: "RunContext", **others: Any) -> Self:
        """Return a context with the attributes of another one and those given."""
        return cls(**{**vars(run), **others})

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return self.config.hparams.seed

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context for forward passes in the arithmetic of the run."""
        return self.precision.autocast(self.world.device)


@dataclass(frozen=True, kw_only=True)
class SourceContext(RunContext):
    """Context of an objective that builds a source of windows.

    Attributes:
        model: as it is called in training.
        batch_size_at: the global batch size after a number of consumed samples.
        build_loader: what reads the training data in the global order: all of it on every rank, or this rank's share.
    """

    model: nn.Module
    batch_size_at: Callable[[int], int]
    build_loader: "Callable[[bool], WindowSource]"


@dataclass(frozen=True, kw_only=True)
class EvaluationContext(RunContext):
    """Context of an evaluator: the run, and where and when it is evaluated.

    Attributes:
        step: optimizer steps taken.
        folder: where rank 0 may write what a person is to look at; it need not exist.
        files: what was written; observers get the first.
    """

    step: int
    folder: Path
    files: list[Path] = field(default_factory=list)


class Evaluator(Protocol):
    """Measures a model during a run, on held-out data, by a benchmark or in a simulator.

    One that has `metrics`, the names of what it measures, or whose configuration lists them under that key, has
    settings that choose another refused at the start. One that has `close()`, with which it frees what it holds, such
    as simulators, is closed at the end of the run.
    """

    def evaluate(self, model: nn.Module, context: EvaluationContext) -> Mapping[str, float]:
        """Measure the model, which is in evaluation mode, without gradients, with averaged weights where there are any.

        Every rank calls it together and returns the same numbers. Randomness comes from generators of its own, since
        training continues with the global ones. `accuracy` is called `val_accuracy` in metrics.jsonl and settings.
        """
        ...


class StopRule(Protocol):
    """May end a run after an evaluation; every rank sees the same numbers and answers the same."""

    def update(self, metrics: Mapping[str, float], epoch: int, share: float) -> str | None:
        """Take in an evaluation.

        Args:
            metrics: by their names in metrics.jsonl.
            epoch: the one in which the evaluated step began; the first is 0.
            share: of the run that is done, from 0 to 1.

        Returns:
            Why the run is to stop; None: it continues.
        """
        ...

    def result(self) -> dict[str, Any]:
        """What result.json says of it; plain JSON."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs; plain JSON."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        ...


@dataclass(frozen=True)
class Window:
    """This rank's microbatches of one global batch, in host memory.

    Attributes:
        microbatches: in the order in which they are run; the same number on every rank.
        num_samples: samples of the whole global batch, over all ranks.
        num_tokens: likewise; None where samples are not sequences of tokens.
        metrics: of the source, the same on all ranks, such as the mean reward of a rollout; logged with the step.
    """

    microbatches: Sequence[Microbatch]
    num_samples: int
    num_tokens: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class WindowSource(Protocol):
    """Where windows of microbatches come from; the source owns its position in the data."""

    def next_window(self) -> Window:
        """The next global batch's share of this rank."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position, from which the same order continues on any number of ranks."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """What the position holds that JSON cannot, equal on all ranks; a checkpoint keeps it as `source.<name>`."""
        ...

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from `tensors()`, in host memory; called after `load_state_dict`."""
        ...

    def rewind(self, samples: int) -> None:
        """Count from `samples` samples again, but read on after what was read last."""
        ...


class Schedule(Protocol):
    """Learning rate and weight decay as pure functions of the clock."""

    def lr(self, samples_before: int, samples_after: int) -> float:
        """The learning rate of the update that consumes samples `samples_before` to `samples_after`."""
        ...

    def weight_decay(self, samples_before: int, samples_after: int) -> float | None:
        """The weight decay of that update; None: what the optimizer was given."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What it is made of, as plain JSON, so that a resumed run can tell whether it still follows the same."""
        ...


@runtime_checkable
class HasPhases(Protocol):
    """A schedule that says its phases, which the plan, the terminal and the plots show."""

    def phases(self) -> list[tuple[str, float]]:
        """The name of each phase of the learning rate, in order, with the samples at whose end it ends."""
        ...


class SaveError(RuntimeError):
    """A checkpoint could not be written; on every rank alike."""


class CheckpointManager(Protocol):
    """Keeps checkpoints of a run, and brings one back; all ranks call it together, except `is_time`."""

    def is_time(self) -> bool:
        """Whether this rank's clock says that a checkpoint is due; true once each time."""
        ...

    def is_due(self, step: int, samples_before: int, samples_after: int, tokens: tuple[int, int] | None = None) -> bool:
        """Whether the interval asks for one after step `step`, which consumed those samples and tokens."""
        ...

    def check_state(self) -> None:
        """Say after an update, once, whether what it has left can be saved.

        Raises:
            ConfigError: it cannot.
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
        """Save the run as it is, with what the trainer's `state_dict` says; None where nothing is to be saved.

        Args:
            progress: the clock.
            state: plain JSON, the same on every rank.
            tensors: of the source of windows, equal on all ranks.
            metric: of an evaluation at this step.
            is_best: no earlier step had a better one.
            wait: return only when it is on the disk.

        Raises:
            SaveError: it was waited for and could not be written.
        """
        ...

    def finish(self) -> None:
        """Wait until everything is on the disk.

        Raises:
            SaveError: the last one could not be written.
        """
        ...

    def close(self) -> None:
        """However the run ends, leave nothing that is being written; not called by all ranks where one is gone."""
        ...

    def roll_back(self) -> dict[str, Any] | None:
        """Bring back the newest checkpoint's weights and optimizers; returns the trainer's state, None without one."""
        ...


class Synchroniser(Protocol):
    """When gradients are reduced over ranks, for whatever the model has become."""

    def microbatch(self, *, first: bool, last: bool) -> Any:
        """A context for the forward and backward pass of one microbatch of the window."""
        ...

    def finish(self) -> None:
        """After the window's last backward pass: reduce what the wrapper does not."""
        ...
