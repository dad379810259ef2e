"""NeMo presets: the defaults in the hyperparameter documentation of NeMo Customizer."""

import json
import math

import pytest
from support.composition import configure
from support.tiny import TINY_LM

from foundry.config.lengths import check_lengths, resolve_budget
from foundry.config.schemas.data import ChatFiles
from foundry.config.schemas.optimizer import Adam, AdamW
from foundry.config.schemas.scheduler import Cosine
from foundry.core.batch_sizes import BatchSizes
from foundry.core.duration import Budget
from foundry.core.errors import ConfigError
from foundry.data.splits import DataSplits
from foundry.engine.train import train
from foundry.parts.optimization import build_budget, build_schedule
from foundry.tasks.post_training.schemas.data import PreferenceFiles
from foundry.tasks.post_training.schemas.objective import DPO, Distillation

STEPS = ["hparams.epochs=null", "hparams.max_steps=50", "evaluation.interval=null"]
SFT = ["hparams=nemo_sft", "model=transformer"]


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}?", "completion": f"{n}."}) + "\n" for n in range(20)))
    return f"data.path={path}"


def test_nemo_sft_preset_has_the_documented_defaults(rows):
    config = configure(*SFT, rows)
    hparams, stopping = config.hparams, config.evaluation.early_stopping
    assert (hparams.global_batch_size, hparams.epochs, hparams.max_steps, hparams.seed) == (8, 50, None, 42)
    assert (hparams.lr, hparams.grad_clip_norm, config.tracking.log_every_n_steps) == (1e-4, None, 10)
    assert (stopping.patience, stopping.unit.value, stopping.min_delta) == (10, "epochs", 0.001)
    assert type(config.optimizer) is AdamW
    assert (config.optimizer.beta1, config.optimizer.beta2) == (0.9, 0.99)
    assert type(config.scheduler) is Cosine
    assert (config.scheduler.warmup, config.scheduler.min_lr, config.scheduler.warmup_init) == ("200", 1e-5, 1e-5)
    assert type(config.data) is ChatFiles
    assert type(configure("optimizer=nemo_adam").optimizer) is Adam
    assert configure("optimizer=nemo_adam").optimizer.beta2 == 0.99
    assert configure(*SFT, rows, "hparams.lr=3e-3").scheduler.min_lr == pytest.approx(3e-4)


def test_nemo_dpo_and_distillation_presets_have_the_documented_defaults(rows, tmp_path):
    config = configure("hparams=nemo_dpo", "model=transformer", rows)
    hparams, objective = config.hparams, config.objective
    assert (hparams.global_batch_size, hparams.epochs, hparams.lr, hparams.grad_clip_norm) == (16, 1, 9e-6, 1.0)
    assert (type(config.data), type(objective), type(config.optimizer)) == (PreferenceFiles, DPO, AdamW)
    assert (objective.ref_policy_kl_penalty, objective.preference_loss_weight, objective.sft_loss_weight) == (
        0.05,
        1,
        0,
    )
    assert not objective.preference_average_log_probs
    assert not objective.sft_average_log_probs
    (tmp_path / "config.json").write_text("{}")
    config = configure("hparams=nemo_distillation", "model=transformer", rows, f"objective.teacher={tmp_path}")
    hparams = config.hparams
    assert (hparams.global_batch_size, hparams.epochs, hparams.lr, hparams.grad_clip_norm) == (8, 50, 1e-4, None)
    assert (type(config.data), type(config.objective)) == (ChatFiles, Distillation)


def budget(steps, size=8):
    return Budget(total_samples=steps * size, batch_sizes=BatchSizes.constant(size), samples_per_epoch=160)


def test_nemo_cosine_starts_and_ends_at_min_lr(rows):
    config = configure(*SFT, rows)
    schedule = build_schedule(config, budget(1000))
    low, peak = 1e-5, 1e-4
    for step in (0, 1, 100, 200, 201, 600, 999):
        if step <= 200:
            expected = low + (peak - low) * step / 200
        else:
            expected = low + (peak - low) * 0.5 * (1 + math.cos(math.pi * (step - 200) / 800))
        assert schedule.lr(8 * step, 8 * step + 8) == pytest.approx(expected, rel=1e-12)


def test_nemo_flat_schedule_is_constant(rows):
    schedule = build_schedule(configure(*SFT, rows, "scheduler=nemo_flat"), budget(30))
    assert {schedule.lr(8 * step, 8 * step + 8) for step in range(30)} == {1e-4}


@pytest.mark.parametrize(("steps", "warmup"), [(1000, 200), (201, 200), (200, 199), (50, 49), (1, 0)])
def test_warmup_longer_than_the_run_is_shortened_with_a_warning(steps, warmup, rows, caplog):
    schedule = build_schedule(configure(*SFT, rows), budget(steps))
    assert schedule.warmup == 8 * warmup
    assert ("scheduler.warmup=200 is longer than the run" in caplog.text) == (warmup < 200)


def test_long_warmup_without_clamp_warmup_is_rejected(rows):
    with pytest.raises(ConfigError, match=r"scheduler\.warmup: is 200: a warm-up of 200 steps does not fit"):
        configure(*SFT, rows, "scheduler.clamp_warmup=false", *STEPS)


@pytest.mark.parametrize("preset", ["nemo_sft", "nemo_dpo"])
@pytest.mark.parametrize(("epoch", "steps"), [(160, 5), (3, 5), (10**6, 5)])
def test_debug_fast_evaluates_in_each_nemo_preset(preset, epoch, steps, rows, caplog):
    config = configure(f"hparams={preset}", "model=transformer", rows, "debug=fast")
    given = resolve_budget(config.hparams, samples_per_epoch=epoch, dp_size=1)
    assert given.total_steps == steps
    assert not list(check_lengths(config, given))
    assert config.evaluation.early_stopping.patience is None
    interval = config.evaluation.interval_in(given)
    size = config.hparams.global_batch_size
    assert [step for step in range(1, 6) if interval.due(step, size * (step - 1), size * step)] == [3, 5]


@pytest.mark.parametrize("interval", ["1.0", "0.5", "100 epoch_steps"])
def test_evaluation_interval_in_epochs_may_exceed_the_run(interval, rows):
    config = configure(*SFT, rows, "hparams.epochs=null", "hparams.max_steps=50", f"evaluation.interval={interval}")
    assert not list(check_lengths(config, resolve_budget(config.hparams, samples_per_epoch=10**5, dp_size=1)))
    config = configure(*SFT, rows, "hparams.max_steps=50", f"evaluation.interval={interval}")
    assert not list(check_lengths(config, resolve_budget(config.hparams, samples_per_epoch=3, dp_size=1)))


@pytest.mark.parametrize(("epochs", "is_warned"), [(10, True), (11, False)])
def test_patience_not_shorter_than_the_run_warns(epochs, is_warned, rows, caplog):
    splits = DataSplits(train=[None] * 160, validation=[], fingerprint="")
    build_budget(configure(*SFT, rows, f"hparams.epochs={epochs}"), splits, 1)
    warning = f"evaluation.early_stopping.patience=10 epochs is not shorter than the run, which has {epochs}"
    assert (warning in caplog.messages) == is_warned


@pytest.mark.long
def test_nemo_sft_preset_trains(rows, tmp_path, caplog):
    words = [word for word in TINY_LM if not word.startswith("objective.")]
    config = configure(*SFT, rows, *words, "data.vocab_size=257", f"data.cache_dir={tmp_path}", "tracking=none")
    (tmp_path / "run").mkdir()
    result = train(config, tmp_path / "run").result
    assert (result["step"], result["samples"]) == (5, 40)
    assert result["val_loss"] > 0
    assert "scheduler.warmup=200 is longer than the run; using 4 steps" in caplog.text
