"""Settings of what the model itself generates to learn from."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from foundry.config.setting import setting
from foundry.core.errors import Violation


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Prompts and answers of a rollout, and how these are drawn: for every objective that generates.

    Attributes:
        needs_rewards: whether rewards are learnt from; otherwise an environment only measures.
    """

    needs_rewards: ClassVar[bool] = False

    num_prompts_per_step: int = setting(1, "prompts of a rollout", ge=1, le=10**7)
    num_generations_per_prompt: int = setting(
        1, "answers to each prompt; objective=grpo compares them with each other and needs at least 2", ge=1, le=10**6
    )
    updates_per_rollout: int = setting(
        1, "optimizer steps that a rollout is divided among, by whole prompts", ge=1, le=10**6
    )
    generation_batch_size: int = setting(32, "answers that a rank generates at a time", ge=1, le=10**6)
    generation_temperature: float = setting(
        1.0, "of what is drawn; 0 takes the likeliest token, which gives a prompt one answer", ge=0, le=1
    )
    generation_top_p: float = setting(
        0.9, "draw from the fewest tokens whose probabilities sum up to this, after top_k", gt=0, le=1
    )
    generation_top_k: int | None = setting(50, "draw from so many of the likeliest tokens; null: all", ge=1)
    generation_pipeline_parallel_size: int = setting(
        1, "stages of the model when it generates: only 1, which NeMo Customizer's configurations give", ge=1, le=1
    )
    max_new_tokens: int = setting(256, "longest answer in tokens", ge=1, le=10**7)
    overlong_filtering: bool = setting(
        False, "learn nothing from answers that did not end by themselves; their rewards still count"
    )

    @property
    def generates(self) -> bool:
        """Whether the objective learns from what the model generates."""
        return True

    @property
    def samples_per_row(self) -> int:
        """Samples that one row of the data makes."""
        return self.num_generations_per_prompt

    @property
    def samples_per_rollout(self) -> int:
        """Answers of a rollout."""
        return self.num_prompts_per_step * self.num_generations_per_prompt

    def check_rollout(self) -> Iterator[Violation]:
        """Refuse a rollout that its updates do not divide, or whose answers to a prompt would be one answer."""
        key, repeated = "objective.generation_temperature", self.num_generations_per_prompt
        if self.generation_temperature == 0 and self.needs_rewards:
            message = "is 0, with which all answers to a prompt are the same and no reward is above another"
            yield Violation(key, f"{message}; give a value above 0, at most 1")
        elif self.generation_temperature == 0 and repeated > 1:
            message = f"is 0, with which all {repeated} answers to a prompt are the same"
            yield Violation(key, f"{message}; set objective.num_generations_per_prompt=1, or a value above 0")
        if self.num_prompts_per_step % self.updates_per_rollout:
            message = f"is {self.updates_per_rollout} but must divide objective.num_prompts_per_step"
            yield Violation("objective.updates_per_rollout", f"{message}={self.num_prompts_per_step}")
