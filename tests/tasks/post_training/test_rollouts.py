"""Composition errors of GRPO runs, and the batch size that the preset derives from a rollout."""

import pytest
from support.composition import configure

from foundry.core.errors import ConfigError

SOUND = [
    "data=arithmetic",
    "data.form=prompts",
    "objective=grpo",
    "objective.num_prompts_per_step=4",
    "objective.num_generations_per_prompt=4",
    "objective.max_new_tokens=48",
    "hparams.global_batch_size=16",
    "environment=arithmetic",
    "evaluation=reward",
]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["objective.num_generations_per_prompt=1", "hparams.global_batch_size=4"],
            "objective.num_generations_per_prompt: is 1, so completions are not compared and nothing is learned; "
            "set at least 2, better 8",
        ),
        (
            ["hparams.global_batch_size=8"],
            "hparams.global_batch_size: is 8 but must be the number of completions per step: num_prompts_per_step 4 x "
            "num_generations_per_prompt 4 / updates_per_rollout 1 = 16",
        ),
        (["objective.updates_per_rollout=3"], "objective.updates_per_rollout: is 3 but must divide objective.num_pro"),
        (["environment=none"], "environment: none is incompatible with objective GRPO, which needs an environment"),
        (["evaluation=default"], "evaluation.evaluators.held_out: measures a held-out loss, which objective GRPO does"),
        (["data.form=chats"], "objective: is GRPO, which needs prompts, but data is Arithmetic, which has completions"),
        (
            ["data.seq_len=48"],
            "data.seq_len: is 48 but completions of objective.max_new_tokens=48 leave no room for prompts",
        ),
        (
            ["objective.generation_temperature=0"],
            "objective.generation_temperature: is 0, so all completions of a prompt are the same and have the same",
        ),
        (["objective.generation_temperature=-1"], "objective.generation_temperature: is -1 but must be at least 0"),
        (["objective.generation_pipeline_parallel_size=2"], "objective.generation_pipeline_parallel_size: is 2"),
        (["objective.ratio_clip_c=1"], "objective.ratio_clip_c: is 1"),
        (
            ["objective.importance_weights=tis"],
            "objective.importance_weights: is tis but has no effect without",
        ),
        (["objective.ref_policy_kl_penalty=0", "objective.kl_type=k1"], "objective.kl_type: is k1 but has no effect"),
        (
            ["objective.use_cispo=true", "objective.disable_ppo_ratio=true"],
            "objective.disable_ppo_ratio: is set together with objective.use_cispo; choose one of them",
        ),
        (["hparams.z_loss_coefficient=1e-4"], "hparams.z_loss_coefficient: is set but objective GRPO has no z-loss"),
    ],
)
def test_invalid_grpo_settings_are_rejected(overrides, message):
    with pytest.raises(ConfigError) as caught:
        configure(*SOUND, *overrides)
    assert message in str(caught.value)


def test_missing_environment_error_lists_options_without_a_metric_error():
    with pytest.raises(ConfigError) as caught:
        configure(*SOUND, "environment=none")
    assert str(caught.value) == (
        "environment: none is incompatible with objective GRPO, which needs an environment that scores completions; "
        "choose an option (arithmetic, exact_match, format, multiple_choice, python), or set _target_"
    )


def test_grpo_answer_evaluator_inherits_max_new_tokens():
    config = configure(*SOUND)
    assert config.data.max_new_tokens == 48
    assert config.evaluation.evaluators["answers"]["max_new_tokens"] == 48
    half = ["objective.updates_per_rollout=2", "hparams.global_batch_size=8"]
    assert configure(*SOUND, *half).objective.samples_per_rollout == 16


def test_nemo_grpo_preset_derives_batch_size_from_the_rollout(tmp_path):
    own = ["model=transformer", "model.max_seq_len=256", "data=arithmetic", "data.form=prompts", "data.seq_len=256"]
    rollout = ["objective.num_prompts_per_step=6", "objective.num_generations_per_prompt=4", "environment=arithmetic"]
    rest = ["objective.max_new_tokens=100", "objective.updates_per_rollout=3"]
    config = configure("hparams=nemo_grpo", *own, *rollout, *rest)
    assert (config.hparams.global_batch_size, config.hparams.grad_clip_norm) == (8, 1.0)
    assert config.evaluation.metric == config.evaluation.early_stopping.metric == "val_reward"
    assert config.evaluation.early_stopping.mode.name == "max"
    objective = config.objective
    assert (objective.ref_policy_kl_penalty, objective.use_rloo, objective.normalize_rewards) == (0.01, True, True)
    assert (objective.generation_top_p, objective.generation_top_k, objective.generation_batch_size) == (0.9, 50, 32)
