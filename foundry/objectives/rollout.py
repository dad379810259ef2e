"""What an objective that learns from the model's own answers and the source of these have to do with each other."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from foundry.config.schemas.rollouts import Rollouts
from foundry.core.protocols import Microbatch


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


@runtime_checkable
class RolloutObjective(Protocol):
    """An objective that learns from what the model itself generates; its microbatches are `Prepared` completions."""

    @property
    def rollouts(self) -> Rollouts | None:
        """How much is generated, and how; None: as it is set, it learns from the data's samples."""
        ...

    @property
    def recorded_models(self) -> tuple[str, ...]:
        """Names of the frozen models that `record` calls; their weights are gathered for it."""
        ...

    def record(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """What is to be known of the models as they are before a rollout's first update, (rows, seq) by name.

        It is called without gradients, in evaluation mode, as often as there are completions of this rank.
        """
        ...

    def prepare(self, rollout: Rollout) -> Prepared:
        """What the updates need of a whole rollout, such as advantages; every rank gets the same."""
        ...

    def example(self, num_samples: int, seq_len: int) -> Microbatch:
        """A microbatch of the shapes that training has, for a plan."""
        ...
