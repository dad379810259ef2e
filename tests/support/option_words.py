"""What each option of each group is composed with."""

import re
from pathlib import Path

from foundry.config.composition.compose import config_dir
from foundry.config.composition.store import GROUPS, group_schemas

OPTIONS = {group: sorted(p.stem for p in (Path(config_dir()) / group).glob("*.yaml")) for group in GROUPS}
ROLLOUT = [
    "objective.num_prompts_per_step=2",
    "objective.num_generations_per_prompt=4",
    "objective.max_new_tokens=32",
    "environment=exact_match",
    "evaluation=reward",
]
ANSWERED = "+evaluation.evaluators.exact_match._target_=foundry.evals.ExactMatch"
POLICY = ("success", "demonstrations", "policy_dit")
COMPANIONS = {
    "chats": ["objective=sft"],
    "preferences": ["objective=dpo"],
    "vla_foundry": ["hparams.max_steps=20000"],
    "megatron": ["hparams.max_steps=20000"],
    **{name: [ANSWERED] for name in ("arithmetic", "exact_match", "multiple_choice", "python")},
    "format": [ANSWERED, "environment.pattern=x"],
    "lora": ["optimizer=adamw"],
    "hsdp": ["distributed.num_replicas=1"],
    "constant": ["scheduler.min_lr=0"],
    "prompts": [*ROLLOUT, "objective=grpo"],
    "reward": ["environment=arithmetic"],
    **{name: ["hparams=policy"] for name in POLICY},
    "scenes": ["experiment=vlm_scenes"],
    "vlm": ["objective=sft", "data=image_chats", "data.path=setup.cfg"],
    "vla": ["experiment=vla_touch"],
    "image_chats": ["objective=sft", "model=vlm"],
}
"""What an option does not compose without."""
DATA_OF = {
    "completions": ["data=arithmetic"],
    "pairs": ["data=arithmetic", "data.form=preferences"],
    "prompts": [*ROLLOUT, "data=arithmetic", "data.form=prompts"],
    "images": ["hparams=diffusion"],
    "actions": ["hparams=policy"],
}
"""Overrides that choose data with each of the things an objective's `wants` may name."""


FREE = ("checkpoint", "device", "distributed", "guard", "optimizer", "precision", "scheduler", "tracking")
"""Groups of which each option composes with any of the others."""


def free_words(place):
    """Return overrides that choose the option at this place in each free group, from the first again after the last."""
    chosen = {group: OPTIONS[group][place % len(OPTIONS[group])] for group in FREE}
    return [word for choice in chosen.items() for word in words_for(*choice)]


def has_no_value(group, option):
    """Whether an option is refused for a setting that only a user can give: a run, a folder or an environment."""
    is_nemo = option.startswith("nemo_") and group == "hparams"
    return is_nemo or option in ("base", "distillation", "gymnasium", "lerobot", "images")


def words_for(group, option):
    """Return overrides that choose an option together with what it does not compose without."""
    overrides = [f"{group}={option}"]
    if (group in ("model", "data") and option in ("dit", "digits")) or option == "images":
        overrides.append("hparams=diffusion")
    if has_no_value(group, option):
        return ["hparams=policy", *overrides] if option == "gymnasium" else overrides
    if group == "simulator" and option != "none":
        overrides.append("hparams=policy")
    if option in ("text", "tokens", "chats", "image_chats", "preferences", "prompts"):
        overrides.append("data.path=setup.cfg")
    if group == "objective" or (group == "hparams" and option in OPTIONS["objective"]):
        overrides += _data_of_objective(option)
    overrides += COMPANIONS.get(option, []) if (group, option) != ("data", "arithmetic") else []
    if option == "hf":
        overrides.append("+model.config={hidden_size: 32}")
    return overrides


def _data_of_objective(option):
    """Overrides without which an objective does not compose, by its schema's `wants`."""
    text = Path(config_dir(), "objective", f"{option}.yaml").read_text()
    wants = group_schemas("objective")[re.search(r"/schema/objective/(\w+)@", text)[1]].wants
    return next((DATA_OF[name] for name in wants if name in DATA_OF), [])
