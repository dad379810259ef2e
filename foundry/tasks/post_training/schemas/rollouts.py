"""Settings of rollouts: the completions that the model generates during training."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from foundry.config.diagnostics.other_frameworks import own_options
from foundry.config.schemas.built_in_evaluators import HeldOut
from foundry.config.setting import OnResume, setting
from foundry.core.errors import Violation

if TYPE_CHECKING:
    from foundry.config.environment import Launch
    from foundry.config.schemas.root import Config


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Settings of a rollout and of its sampling, shared by all objectives that generate completions.

    Attributes:
        needs_rewards: the objective trains on rewards; if false, an environment only provides metrics.
    """

    needs_rewards: ClassVar[bool] = False

    num_prompts_per_step: int = setting(1, "prompts per rollout", ge=1, le=10**7)
    num_generations_per_prompt: int = setting(
        1, "completions per prompt; objective=grpo compares them with each other and needs at least 2", ge=1, le=10**6
    )
    updates_per_rollout: int = setting(1, "optimizer steps per rollout, each on a part of the prompts", ge=1, le=10**6)
    generation_batch_size: int = setting(
        32, "completions that a rank generates at a time; new ones start when some finish", ge=1, le=10**6
    )
    generation_temperature: float = setting(
        1.0, "sampling temperature; 0: the most likely token, so that all completions of a prompt are equal", ge=0, le=1
    )
    generation_top_p: float = setting(
        0.9, "sample from the fewest most likely tokens whose probabilities sum up to this, after top_k", gt=0, le=1
    )
    generation_top_k: int | None = setting(50, "sample from this number of most likely tokens; null: all", ge=1)
    generation_pipeline_parallel_size: int = setting(
        1, "pipeline-parallel size of generation; must be 1, the value in NeMo Customizer's configurations", ge=1, le=1
    )
    max_new_tokens: int = setting(256, "maximum length of a completion in tokens", ge=1, le=10**7)
    share_prompts: bool | None = setting(
        None,
        "compute the tokens of a prompt once for all of its completions in a microbatch, with the same gradients; "
        "null: if the model supports it and is not compiled",
        on_resume=OnResume.same,
        since="0.1.0",
    )
    overlong_filtering: bool = setting(False, "exclude truncated completions from the loss; their rewards still count")

    @property
    def generates(self) -> bool:
        """True if the objective trains on completions of the model."""
        return True

    @property
    def samples_per_row(self) -> int:
        """Number of training samples per row of the dataset."""
        return self.num_generations_per_prompt

    @property
    def samples_per_rollout(self) -> int:
        """Number of completions in a rollout."""
        return self.num_prompts_per_step * self.num_generations_per_prompt

    def check_with(self, run: "Config", launch: "Launch") -> Iterator[Violation]:
        """Check that batch size, environment and evaluators fit the rollout."""
        if not self.generates:
            return
        hparams, name = run.hparams, getattr(self, "described", type(self).__name__)
        is_scored = getattr(run.environment, "_target_", "") is not None
        if self.needs_rewards and not is_scored:
            options = ", ".join(option for option in own_options("environment") if option != "none")
            remedy = f"choose an option ({options}), or set _target_"
            yield Violation(
                "environment",
                f"none is incompatible with objective {name}, which needs an environment that scores completions; "
                f"{remedy}",
            )
        rollout, updates = self.samples_per_rollout, self.updates_per_rollout
        if hparams.batch_schedule is not None or hparams.batch_ramp.start is not None:
            key = "batch_ramp" if hparams.batch_schedule is None else "batch_schedule"
            yield Violation(
                f"hparams.{key}", f"is set but all steps of objective {name} have the same size; leave it out"
            )
        elif hparams.global_batch_size * updates != rollout and rollout % updates == 0:
            answers = f"num_prompts_per_step {self.num_prompts_per_step} x num_generations_per_prompt "
            answers += f"{self.num_generations_per_prompt} / updates_per_rollout {updates} = {rollout // updates}"
            message = f"is {hparams.global_batch_size} but must be the number of completions per step: {answers}"
            yield Violation("hparams.global_batch_size", message)
        if hparams.allow_rounding:
            yield Violation(
                "hparams.allow_rounding",
                f"is true but objective {name} trains on all completions of a step; set it to false",
            )
        if self.share_prompts and hparams.torchcompile:
            message = "is true together with hparams.torchcompile, which would compile the model for each microbatch"
            yield Violation("objective.share_prompts", f"{message}; set one of them to false")
        for key, node in run.evaluation.evaluators.items():
            if isinstance(node, dict) and node.get("_target_") == HeldOut._target_:
                remedy = "reward" if self.needs_rewards or is_scored else "answers"
                message = f"measures a held-out loss, which objective {name} does not have; choose evaluation={remedy}"
                yield Violation(f"evaluation.evaluators.{key}", message)

    def check_rollout(self) -> Iterator[Violation]:
        """Check that updates divide the prompts, and that temperature 0 is not used where completions must differ."""
        key, repeated = "objective.generation_temperature", self.num_generations_per_prompt
        if self.generation_temperature == 0 and self.needs_rewards:
            message = "is 0, so all completions of a prompt are the same and have the same reward"
            yield Violation(key, f"{message}; set a value above 0, at most 1")
        elif self.generation_temperature == 0 and repeated > 1:
            message = f"is 0, so all {repeated} completions of a prompt are the same"
            yield Violation(key, f"{message}; set objective.num_generations_per_prompt=1, or a value above 0")
        if self.num_prompts_per_step % self.updates_per_rollout:
            message = f"is {self.updates_per_rollout} but must divide objective.num_prompts_per_step"
            yield Violation("objective.updates_per_rollout", f"{message}={self.num_prompts_per_step}")
