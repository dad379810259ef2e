"""Post-training: language models trained on rewards, on preferences or on the distributions of a teacher."""

from foundry.core.tasks import Planned, Task

_HERE = "foundry.tasks.post_training"

TASK = Task(
    name="post_training",
    schemas={
        "data": (f"{_HERE}.schemas.data",),
        "environment": (f"{_HERE}.schemas.environment",),
        "objective": (f"{_HERE}.schemas.objective",),
    },
    checks=(f"{_HERE}.checks.environments:check_environment",),
    resolvers={"completions_per_update": f"{_HERE}.resolvers:completions_per_update"},
    pins=(f"{_HERE}.teacher:pin_teacher",),
    builders={"environment": f"{_HERE}.environments.judge:build_judge"},
    forms={
        "preferences": f"{_HERE}.data.preferences:preference_splits",
        "prompts": f"{_HERE}.data.prompts:prompt_splits",
    },
    planned={"rollout": Planned(value=f"{_HERE}.planned:rollout_sizes", row=f"{_HERE}.planned:rollout_row")},
    objectives={"rollouts": f"{_HERE}.protocols:RolloutObjective"},
    options={
        "data": ("preferences", "prompts"),
        "environment": ("arithmetic", "exact_match", "format", "multiple_choice", "python"),
        "evaluation": ("reward",),
        "experiment": ("distill_arithmetic", "dpo_arithmetic", "grpo_arithmetic", "onpolicy_arithmetic"),
        "hparams": ("distillation", "dpo", "grpo", "nemo_distillation", "nemo_dpo", "nemo_grpo"),
        "objective": ("distillation", "dpo", "grpo"),
    },
)
