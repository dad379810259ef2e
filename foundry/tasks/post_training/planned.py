"""Sizes of a rollout in the plan of a run."""

from collections.abc import Mapping

from foundry.config.schemas.root import Config
from foundry.tasks.post_training.schemas.rollouts import Rollouts


def rollout_sizes(config: Config) -> dict[str, int] | None:
    """Return the sizes of a rollout by name; None unless a built-in objective trains on completions of the model."""
    objective = config.objective
    if not isinstance(objective, Rollouts) or not objective.generates:
        return None
    return {
        "prompts": objective.num_prompts_per_step,
        "generations": objective.num_generations_per_prompt,
        "answers": objective.samples_per_rollout,
        "updates": objective.updates_per_rollout,
        "max_new_tokens": objective.max_new_tokens,
    }


def rollout_row(rollout: Mapping[str, int]) -> tuple[str, str]:
    """Return name and value of the printed plan's row for the rollout sizes of `rollout_sizes`."""
    updates = f"{rollout['updates']} step{'s' * (rollout['updates'] > 1)}"
    product = f"{rollout['prompts']} prompts x {rollout['generations']} = {rollout['answers']}"
    return "completions per rollout", f"{product}, of at most {rollout['max_new_tokens']} tokens, for {updates}"
