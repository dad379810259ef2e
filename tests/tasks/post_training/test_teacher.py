"""`objective.teacher`: the model it resolves to, and its errors at composition time."""

import pytest
from support.composition import configure
from support.tiny import SMALL_LM

from foundry.commands.library import compose
from foundry.config.record.frozen import save_config
from foundry.config.schemas.model import HuggingFace, Transformer
from foundry.core.errors import ConfigError
from foundry.parts.objective import build_objective

STUDENT = [*SMALL_LM, "data.vocab_size=300", "objective=distillation", "evaluation.write_samples=false"]


@pytest.fixture
def run_dir(tmp_path):
    """The parts of a run directory that composition reads: config.yaml and checkpoint names."""
    folder = tmp_path / "teacher"
    for step in (10, 20):
        (folder / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
        (folder / "checkpoints" / f"step_{step:08d}" / "manifest.json").touch()
    (folder / "checkpoints" / "latest").symlink_to("step_00000020")
    (folder / "checkpoints" / "best").symlink_to("step_00000010")
    save_config(configure(*SMALL_LM, "model.num_layers=3", "data.vocab_size=300"), folder)
    return folder


def refused(*overrides):
    with pytest.raises(ConfigError) as error:
        compose([*STUDENT, *overrides])
    return str(error.value)


@pytest.mark.parametrize(("which", "step"), [("last", "20"), ("best", "10"), ("10", "10")])
def test_teacher_which_resolves_to_a_checkpoint_step(run_dir, which, step):
    config = compose([*STUDENT, f"objective.teacher={run_dir}", f"objective.teacher_which={which}"])
    assert config.objective.teacher_which == step
    teacher = build_objective(config.objective, config.peft).frozen_models["teacher"]
    assert isinstance(teacher, Transformer)
    assert (teacher.num_layers, teacher.vocab_size) == (3, 300)
    assert teacher.init_from == str(run_dir / "checkpoints" / f"step_{int(step):08d}")


def test_transformers_teacher_takes_the_sizes_of_the_student(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    config = compose([*STUDENT, f"objective.teacher={tmp_path}"])
    teacher = build_objective(config.objective, config.peft).frozen_models["teacher"]
    assert isinstance(teacher, HuggingFace)
    assert (teacher.path, teacher.vocab_size, teacher.max_seq_len) == (str(tmp_path), 300, 32)
    assert refused(f"objective.teacher={tmp_path}", "objective.teacher_which=best").startswith(
        "objective.teacher_which: is best but objective.teacher is a transformers folder, which has no checkpoints"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "objective.teacher: has no value"),
        (["objective.teacher=nowhere"], "objective.teacher: is nowhere, which does not exist"),
        (["objective.teacher=.."], "objective.teacher: is .., which is neither a run directory"),
        (
            ["objective.teacher=RUN", "objective.teacher_which=30"],
            "objective.teacher_which: is 30 but RUN has no check",
        ),
        (["objective.teacher=RUN", "data.vocab_size=299"], "objective.teacher: is RUN, whose model has 300 tokens but"),
        (
            ["objective.teacher=RUN", "data.seq_len=33"],
            "objective.teacher: is RUN, whose model has 32 positions; lower",
        ),
        (
            ["objective.teacher=RUN", "objective.jsd_beta=0.3"],
            "objective.jsd_beta: is 0.3 but has no effect without obj",
        ),
        (
            ["objective.teacher=RUN", "objective.outside_top_k=zero"],
            "objective.outside_top_k: is zero but has no effect",
        ),
        (["objective.teacher=RUN", "hparams.z_loss_coefficient=1"], "hparams.z_loss_coefficient: is set but objective"),
    ],
)
def test_invalid_teacher_settings_give_a_one_line_error(run_dir, overrides, message):
    lines = refused(*(override.replace("RUN", str(run_dir)) for override in overrides)).splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(message.replace("RUN", str(run_dir)))


ON_POLICY = [
    *SMALL_LM,
    "data=arithmetic",
    "data.form=prompts",
    "data.vocab_size=300",
    "objective=distillation",
    "objective.teacher=RUN",
    "objective.mode=on_policy",
    "objective.max_new_tokens=8",
    "objective.num_prompts_per_step=4",
    "objective.num_generations_per_prompt=2",
    "evaluation=answers",
]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["objective.ce_ratio=0.5"],
            "objective.ce_ratio: is 0.5 but with objective.mode=on_policy there are no reference answers to train on",
        ),
        (
            ["hparams.global_batch_size=16"],
            "hparams.global_batch_size: is 16 but must be the number of completions per step: num_prompts_per_step 4 x "
            "num_generations_per_prompt 2 / updates_per_rollout 1 = 8",
        ),
        (["objective.updates_per_rollout=3"], "objective.updates_per_rollout: is 3 but must divide objective.num_pro"),
        (
            ["data.form=chats"],
            "objective: is Distillation with mode=on_policy, which needs prompts, but data is Arithmetic, which has co",
        ),
        (
            ["data.seq_len=8"],
            "data.seq_len: is 8 but completions of objective.max_new_tokens=8 leave no room for prompts",
        ),
        (
            ["objective.generation_temperature=0"],
            "objective.generation_temperature: is 0, so all 2 completions of a prompt are the same; set "
            "objective.num_generations_per_prompt=1, or a value above 0",
        ),
        (["objective.jsd_beta=0.3"], "objective.jsd_beta: is 0.3 but has no effect without objective.divergence=jsd"),
        (
            ["evaluation=default"],
            "evaluation.evaluators.held_out: measures a held-out loss, which objective Distillation with "
            "mode=on_policy does not have; choose evaluation=answers",
        ),
        (["evaluation.metric=val_reward"], "evaluation.metric: is val_reward but evaluations measure val_exact_match"),
    ],
)
def test_invalid_on_policy_settings_give_a_one_line_error(run_dir, overrides, message):
    with pytest.raises(ConfigError) as error:
        compose([word.replace("RUN", str(run_dir)) for word in (*ON_POLICY, *overrides)])
    (line,) = str(error.value).splitlines()
    assert line.startswith(message)


def test_on_policy_distillation_composes_with_or_without_environment(run_dir):
    words = [word.replace("RUN", str(run_dir)) for word in ON_POLICY]
    config = compose(words)
    assert (config.objective.ce_ratio, config.environment._target_) == (None, None)
    assert config.objective.wants == {"prompts"}
    greedy = ["objective.generation_temperature=0", "objective.num_generations_per_prompt=1"]
    assert compose([*words, *greedy, "hparams.global_batch_size=4"]).objective.generation_temperature == 0
    config = compose([*words, "objective.ce_ratio=0", "environment=arithmetic", "evaluation=reward"])
    assert config.evaluation.metric == "val_reward"


@pytest.mark.parametrize(
    "override",
    ["num_prompts_per_step=2", "generation_top_p=0.5", "max_new_tokens=9", "overlong_filtering=true"],
)
def test_rollout_settings_are_rejected_in_offline_distillation(run_dir, override):
    name, value = override.split("=")
    value = {"true": "True"}.get(value, value)
    message = refused(f"objective.teacher={run_dir}", f"objective.{override}")
    assert message == f"objective.{name}: is {value} but has no effect without objective.mode=on_policy"


def test_teacher_with_a_foreign_target_requires_trust(run_dir):
    file = run_dir / "config.yaml"
    file.write_text(file.read_text().replace("foundry.Transformer", "os.system"))
    message = refused(f"objective.teacher={run_dir}")
    assert message.startswith("objective.teacher: ")
    assert "add objective.teacher_trust=true" in message


def test_image_model_is_rejected_as_a_teacher(run_dir):
    save_config(configure("hparams=diffusion", "model=dit", "data=digits", "objective=diffusion"), run_dir)
    assert refused(f"objective.teacher={run_dir}") == (
        f"objective.teacher: is {run_dir}, whose model is DiT; choose a language model"
    )
