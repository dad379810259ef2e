"""A run keeps the defaults that it began with, unless the user types other values."""

import pytest
from support.composition import compose

from foundry.config.composition.former_defaults import FORMER_DEFAULTS
from foundry.run_dir.names import CONFIG

FORMER = """
model: {_target_: foundry.Transformer, qk_norm: false}
optimizer: {_target_: foundry.optimizers.muon, beta1: 0.9, beta2: 0.95, momentum_warmup_start: null}
scheduler: {_target_: foundry.schedules.Cosine.from_durations, warmup: '0.05'}
"""


def value(config, key):
    node = config
    for name in key.split("."):
        node = node[name]
    return node


@pytest.fixture
def recorded(tmp_path):
    (tmp_path / CONFIG).write_text(FORMER)
    return f"hydra.run.dir={tmp_path}"


def test_new_run_has_the_current_defaults(tmp_path):
    config = compose(f"hydra.run.dir={tmp_path}")
    assert [value(config, default.key) for default in FORMER_DEFAULTS] == [each.current for each in FORMER_DEFAULTS]
    assert config.scheduler._target_ == "foundry.schedules.Linear.from_durations"


def test_begun_run_keeps_former_defaults_also_of_settings_that_its_record_lacks(recorded):
    config = compose(recorded, "scheduler.warmup=7")
    first_values = {default.key: default.former for default in reversed(FORMER_DEFAULTS)}
    assert {key: value(config, key) for key in first_values} == first_values
    assert config.scheduler._target_ == "foundry.schedules.Cosine.from_durations"
    assert config.scheduler.warmup == "7"


def test_begun_run_keeps_the_value_that_it_recorded_of_several_former_defaults(tmp_path):
    groups = "groups: {embeddings: {lr_mult: 20.0}, head: {lr_mult: 2.0}}"
    (tmp_path / CONFIG).write_text(FORMER.replace("beta1: 0.9", f"beta1: 0.8, {groups}"))
    optimizer = compose(f"hydra.run.dir={tmp_path}").optimizer
    assert (optimizer.beta1, optimizer.groups.embeddings.lr_mult, optimizer.groups.head.lr_mult) == (0.8, 20, 2)


def test_checkpoint_to_resume_has_the_former_defaults(recorded, tmp_path):
    folder = tmp_path / "checkpoints" / "step_00000002"
    folder.mkdir(parents=True)
    assert compose(f"checkpoint.resume={folder}", f"hydra.run.dir={tmp_path}/other").model.qk_norm is False


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("model.qk_norm=true", "model.qk_norm"),
        ("optimizer.beta1=0.5", "optimizer.beta1"),
        ("optimizer.groups.head.lr_mult=2", "optimizer.groups.head.lr_mult"),
        ("optimizer.groups={embeddings:{lr_mult:20}}", "optimizer.groups.embeddings.lr_mult"),
        ("scheduler=linear", "scheduler._target_"),
        ("checkpoint.resume=never", "model.zero_init_outputs"),
    ],
)
def test_typed_values_are_never_replaced(word, key, recorded, tmp_path):
    assert value(compose(recorded, word), key) == value(compose(f"hydra.run.dir={tmp_path}/new", word), key)


def test_record_of_another_model_changes_nothing(tmp_path):
    (tmp_path / CONFIG).write_text("model: {_target_: foundry.DiT}")
    assert compose(f"hydra.run.dir={tmp_path}").model.qk_norm is True


def test_schedule_that_another_option_chooses_is_never_replaced(recorded):
    sizes = [f"hparams.{name}=4" for name in ("global_batch_size", "per_gpu_batch_size", "max_steps")]
    config = compose(recorded, "hparams=megatron", "hparams.lr=1e-3", *sizes)
    assert config.scheduler._target_ == "foundry.schedules.Linear.from_durations"


def test_record_of_the_current_defaults_changes_nothing(tmp_path):
    current = FORMER.replace("qk_norm: false", "qk_norm: true").replace("Cosine", "Linear")
    (tmp_path / CONFIG).write_text(current)
    config = compose(f"hydra.run.dir={tmp_path}")
    assert config.model.qk_norm is True
    assert config.scheduler._target_ == "foundry.schedules.Linear.from_durations"
