"""Post-training: language models trained on rewards, on preferences or on the distributions of a teacher."""

from foundry.core.tasks import Planned, Task

TASK = Task(
    name="post_training",
    checks=("foundry.config.checks.environments:check_environment",),
    resolvers={"completions_per_update": "foundry.tasks.post_training.resolvers:completions_per_update"},
    pins=("foundry.config.teacher:pin_teacher",),
    builders={"environment": "foundry.environments.judge:build_judge"},
    forms={
        "preferences": "foundry.data.conversations.preferences:preference_splits",
        "prompts": "foundry.data.conversations.prompts:prompt_splits",
    },
    planned={
        "rollout": Planned(
            value="foundry.tasks.post_training.planned:rollout_sizes",
            row="foundry.tasks.post_training.planned:rollout_row",
        )
    },
)
