"""Overrides that each option of each group requires to compose."""

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
"""Additional overrides that an option requires."""
DATA_OF = {
    "completions": ["data=arithmetic"],
    "pairs": ["data=arithmetic", "data.form=preferences"],
    "prompts": [*ROLLOUT, "data=arithmetic", "data.form=prompts"],
    "images": ["hparams=diffusion"],
    "actions": ["hparams=policy"],
}
"""Overrides that choose data, by an entry of the `wants` of an objective."""


FREE = ("checkpoint", "device", "distributed", "guard", "optimizer", "precision", "scheduler", "tracking")
"""Groups whose options compose in any combination."""


def free_words(index):
    """Return overrides that choose the option at index `index` in each free group, modulo the number of options."""
    options = {group: OPTIONS[group][index % len(OPTIONS[group])] for group in FREE}
    return [word for choice in options.items() for word in words_for(*choice)]


def has_no_value(group, option):
    """Return whether an option requires a setting from the user: a run, a folder or an environment."""
    is_nemo = option.startswith("nemo_") and group == "hparams"
    return is_nemo or option in ("base", "distillation", "gymnasium", "lerobot", "images")


def words_for(group, option):
    """Return overrides that choose an option together with the overrides that it requires."""
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
    """Return the overrides of data that an objective requires, by the `wants` of its schema."""
    text = Path(config_dir(), "objective", f"{option}.yaml").read_text()
    wants = group_schemas("objective")[re.search(r"/schema/objective/(\w+)@", text)[1]].wants
    return next((DATA_OF[name] for name in wants if name in DATA_OF), [])
