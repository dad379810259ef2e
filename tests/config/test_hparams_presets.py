"""Each preset in conf/hparams needs no override except the few in `NEEDS`, such as data or environment, and no
experiment sets values of an optimizer."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from support.composition import configure

from foundry.config.composition.compose import config_dir

PRESETS = sorted(path.stem for path in Path(config_dir(), "hparams").glob("*.yaml"))
NEEDS = {
    "nemo_sft": ["model", "data"],
    "nemo_dpo": ["model", "data"],
    "nemo_distillation": ["model", "data", "teacher"],
    "nemo_grpo": ["model", "data", "environment"],
    "sft": ["data"],
    "dpo": ["data"],
    "grpo": ["data", "environment"],
    "distillation": ["teacher"],
    "vlm": ["pictures", "size"],
    "vla": ["seen", "told", "one observation"],
    "vla_foundry": ["budget"],
    "megatron": ["budget"],
}
"""Names of the settings that a preset requires from the user."""


@pytest.fixture
def words(tmp_path):
    """Overrides by their names in NEEDS."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1?", "answer": "2"}) + "\n")
    return {
        "model": "model=transformer",
        "data": f"data.path={tmp_path / 'rows.jsonl'}",
        "teacher": f"objective.teacher={tmp_path}",
        "environment": "environment=exact_match",
        "pictures": "data=image_chats",
        "size": f"data.path={tmp_path / 'rows.jsonl'}",
        "seen": "simulator.image_size=48",
        "told": "data.instruction_tokens=24",
        "one observation": "data.num_observations=1",
        "budget": "hparams.max_steps=20000",
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_composes_with_its_required_user_settings_only(words, preset):
    config = configure(f"hparams={preset}", *(words[name] for name in NEEDS.get(preset, [])))
    assert config.hparams.global_batch_size >= 1


@pytest.mark.parametrize("seq_len", [None, 2, 100, 4096])
def test_grpo_preset_reserves_half_of_each_sequence_for_the_prompt(words, seq_len):
    own = [] if seq_len is None else [f"data.seq_len={seq_len}"]
    config = configure("hparams=nemo_grpo", *(words[name] for name in NEEDS["nemo_grpo"]), *own)
    assert config.objective.max_new_tokens == config.data.max_new_tokens == config.data.seq_len // 2
    assert config.hparams.global_batch_size == config.objective.samples_per_rollout == 8


def test_experiments_set_no_value_of_an_optimizer():
    # It would also apply to any other optimizer that the user selects. Documents that are presets set their own.
    experiments = {path: OmegaConf.load(path) for path in Path(config_dir(), "experiment").glob("*.yaml")}
    assert experiments
    assert not [path for path, option in experiments.items() if "optimizer" in option]
