"""Base class of objectives that train on completions of the model, and the rollouts that they receive."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from foundry.core.protocols import Microbatch, Objective, SourceContext, WindowSource


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Prompts with the model's completions, in host memory; completions of one prompt are adjacent.

    Attributes:
        tokens: (completions, seq) int64, a prompt and its completion, padded on the right.
        targets: (completions, seq) int64, tokens shifted left by one; -100 if the target is not a token of the
            completion.
        group: (completions,) int64, index of the prompt.
        rewards: (completions,) float64; NaN if a completion could not be scored or there is no environment.
        is_truncated: (completions,) bool, True if a completion did not end with a stop token.
        sampler: (completions, seq) float32, log-probability of each target in the sampling distribution; 0 elsewhere.
        recorded: (completions, seq) float32 by name, values returned by the objective's `record`.
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
    """Values that an objective computes from a whole rollout before its updates.

    Attributes:
        columns: (completions, ...) each, added to a microbatch's `tokens`, `targets` and `position`, or replacing them.
        metrics: metrics logged with each of the rollout's updates.
    """

    columns: Mapping[str, Tensor]
    metrics: Mapping[str, float] = field(default_factory=dict)


class RolloutObjective(Objective):
    """Base class of objectives that can train on completions of the model.

    An objective of another class with an attribute `rollouts` gets the members of this class that it lacks.
    """

    rollouts: Any = None
    """Settings of rollouts, a `foundry.tasks.post_training.schemas.rollouts.Rollouts`; the run then calls `record`,
    `prepare` and `example`. None: the objective trains on the samples of the data."""

    shares_prompts: bool = False
    """Whether `loss` and `record` pass `document_keywords` to each model and read values by completion with `unpack`,
    so that the completions of a prompt can share its tokens. The class that defines `loss` has to set it."""

    @property
    def makes_samples(self) -> bool:  # type: ignore[override] # depends on the settings
        """True if the objective trains on completions of the model."""
        return self.rollouts is not None

    @property
    def build_source(self) -> Callable[[SourceContext], WindowSource] | None:  # type: ignore[override] # as above
        """Builder of the source of completions; None if the objective trains on the samples of the data."""
        if self.rollouts is None:
            return None
        from foundry.tasks.post_training.rollouts.source import RolloutSource

        return partial(RolloutSource.of, self)

    def bytes_for_samples(self, model: nn.Module, seq_len: int, element_size: int) -> int | None:
        """Return the bytes of keys and values for the completions that a rank generates at a time; None if unknown."""
        from foundry.tasks.post_training.rollouts.cache_size import cache_bytes

        return cache_bytes(model, self.rollouts, seq_len, element_size)

    def record(self, model: nn.Module, microbatch: Microbatch) -> dict[str, Tensor]:
        """Return values of model and frozen models before a rollout's first update, (completions, seq) by name.

        Called without gradients, in eval mode, with at most `generation_batch_size` completions of this rank at a time.
        The microbatch has their tokens and targets, and the sampling log-probabilities as `sampler`.
        """
        return {}

    def prepare(self, rollout: Rollout) -> Prepared:
        """Return values computed from the whole rollout, such as advantages; they must be equal on all ranks."""
        return Prepared({})
