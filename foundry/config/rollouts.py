"""What an objective that learns from the model's own answers asks of the rest of a run."""

from collections.abc import Iterator

from foundry.config.errors import Violation
from foundry.config.metrics import HELD_OUT
from foundry.config.schemas.policy import PolicyGradient
from foundry.config.schemas.root import Config


def check_rollouts(config: Config) -> Iterator[Violation]:
    """Say where the batch, the environment or the evaluations are not those of a rollout."""
    objective, hparams = config.objective, config.hparams
    if not isinstance(objective, PolicyGradient):
        return
    name = type(objective).__name__
    if getattr(config.environment, "_target_", "") is None:
        message = f"is none but objective {name} needs one that scores answers; choose an option, or give _target_"
        yield Violation("environment", message)
    rollout, updates = objective.samples_per_rollout, objective.updates_per_rollout
    if hparams.batch_schedule is not None or hparams.batch_ramp.start is not None:
        key = "batch_ramp" if hparams.batch_schedule is None else "batch_schedule"
        yield Violation(f"hparams.{key}", f"is given but a step of objective {name} has always the same size")
    elif hparams.global_batch_size * updates != rollout and rollout % updates == 0:
        answers = f"num_prompts_per_step {objective.num_prompts_per_step} x num_generations_per_prompt "
        answers += f"{objective.num_generations_per_prompt} / updates_per_rollout {updates} = {rollout // updates}"
        message = f"is {hparams.global_batch_size} but must be the answers of a step: {answers}"
        yield Violation("hparams.global_batch_size", message)
    if hparams.allow_rounding:
        yield Violation("hparams.allow_rounding", f"is True but objective {name} learns from all answers of a step")
    for key, node in config.evaluation.evaluators.items():
        if isinstance(node, dict) and node.get("_target_") == HELD_OUT:
            message = f"measures a held-out loss, which objective {name} has not; choose evaluation=reward"
            yield Violation(f"evaluation.evaluators.{key}", message)
