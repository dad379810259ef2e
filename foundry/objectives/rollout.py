"""What an objective that learns from the model's own answers and the source of these have to do with each other."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from foundry.core.protocols import Microbatch
from foundry.generation.decoding import Decoding


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """How much is generated, and how.

    Attributes:
        num_prompts: of a rollout.
        num_generations: completions of each prompt.
        num_updates: optimizer steps that a rollout is for; each takes its share of the prompts.
        batch_size: completions that are generated at a time, by one rank.
        decoding: how; its seed is the run's.
        leaves_out_truncated: nothing is learnt from completions that did not end by themselves.
        needs_rewards: they are learnt from, and not only measured.
        recorded_models: names of the frozen models that `record` asks, whose weights are gathered for it.
    """

    num_prompts: int
    num_generations: int
    num_updates: int
    batch_size: int
    decoding: Decoding
    leaves_out_truncated: bool = False
    needs_rewards: bool = True
    recorded_models: Collection[str] = ()

    @classmethod
    def from_options(
        cls,
        *,
        num_prompts_per_step: int = 1,
        num_generations_per_prompt: int = 1,
        updates_per_rollout: int = 1,
        generation_batch_size: int = 32,
        generation_temperature: float = 1.0,
        generation_top_p: float = 0.9,
        generation_top_k: int | None = 50,
        generation_pipeline_parallel_size: int = 1,
        max_new_tokens: int = 256,
        overlong_filtering: bool = False,
        needs_rewards: bool = True,
        recorded_models: Collection[str] = (),
    ) -> "RolloutSettings":
        """As the schema `Rollouts` calls them.

        Args:
            num_prompts_per_step: prompts of a rollout.
            num_generations_per_prompt: completions of each.
            updates_per_rollout: optimizer steps that a rollout is cut into.
            generation_batch_size: completions generated at a time.
            generation_temperature: as in `Decoding`.
            generation_top_p: as in `Decoding`.
            generation_top_k: as in `Decoding`.
            generation_pipeline_parallel_size: 1.
            max_new_tokens: longest completion.
            overlong_filtering: nothing is learnt from completions that did not end by themselves.
            needs_rewards: as the attribute.
            recorded_models: as the attribute.
        """
        return cls(
            num_prompts=num_prompts_per_step,
            num_generations=num_generations_per_prompt,
            num_updates=updates_per_rollout,
            batch_size=generation_batch_size,
            decoding=Decoding(
                max_new_tokens=max_new_tokens,
                temperature=generation_temperature,
                top_k=generation_top_k,
                top_p=generation_top_p,
            ),
            leaves_out_truncated=overlong_filtering,
            needs_rewards=needs_rewards,
            recorded_models=recorded_models,
        )

    @property
    def num_completions(self) -> int:
        """Of a rollout."""
        return self.num_prompts * self.num_generations


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
    def rollouts(self) -> RolloutSettings | None:
        """How much is generated, and how; None: as it is set, it learns from the data's samples."""
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
