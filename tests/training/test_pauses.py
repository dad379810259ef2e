"""Runs that pause at rungs of a search: exact steps, and the same weights as a run that does not pause."""

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.examples import examples

from foundry.checkpoint.folder import read_manifest
from foundry.config.schemas.checkpoint import Checkpoint, KeepBest
from foundry.config.schemas.evaluation import EarlyStopping, Evaluation, Mode, PatienceUnit
from foundry.config.schemas.hparams import HParams
from foundry.config.schemas.optimizer import AdamW
from foundry.config.schemas.precision import Precision, PrecisionMode
from foundry.config.schemas.root import Config
from foundry.config.schemas.scheduler import Cosine
from foundry.config.schemas.tracking import Tracking
from foundry.core.batch_sizes import BatchSizes
from foundry.core.duration import Budget, Interval
from foundry.core.errors import ConfigError
from foundry.core.progress import Progress
from foundry.engine.train import train
from foundry.run_dir.checkpoints import find
from foundry.run_dir.rung import Rung
from foundry.run_dir.status import read_status
from foundry.tracking.metrics_file import read_metrics
from foundry.training.pause import Pause

STEPS, BATCH = 12, 8
CONFIG = Config(
    hparams=HParams(
        global_batch_size=BATCH, per_gpu_batch_size=4, accum_freq=2, lr=0.1, max_steps=STEPS, ema_decay=0.9
    ),
    optimizer=AdamW(weight_decay=0.1),
    scheduler=Cosine(warmup="0.25"),
    precision=Precision(mode=PrecisionMode.fp32),
    model={"_target_": "sequence_parts.Linear"},
    data={"_target_": "sequence_parts.whole_numbers", "has_spike": False},
    objective={"_target_": "sequence_parts.Sum", "is_noisy": True},
    evaluation=Evaluation(
        interval="3",
        write_samples=False,
        evaluators={
            "held_out": {"_target_": "foundry.evals.HeldOut"},
            "guesses": {"_target_": "sequence_parts.Guesses"},
        },
    ),
    checkpoint=Checkpoint(
        interval="2", every_minutes=None, asynchronous=False, keep_best=KeepBest(metric="val_loss", mode=Mode.min)
    ),
    tracking=Tracking(log_every_n_steps=1, progress=False, plots=False, mlflow=False),
)
STOPPING = EarlyStopping(metric="val_loss", patience=2, unit=PatienceUnit.evaluations, min_delta=1000.0)
VARIANTS = {
    "to the end": CONFIG,
    "stops early": replace(CONFIG, evaluation=replace(CONFIG.evaluation, early_stopping=STOPPING)),
    "no evaluation": replace(CONFIG, evaluation=replace(CONFIG.evaluation, interval=None)),
}
UNITS = {"steps": lambda step: f"{step}", "samples": lambda step: f"{max(step * BATCH - 3, BATCH)} samples"}


def pause_at(run_dir, number, at):
    Rung(number=number, at=at, metric="val_loss").save(run_dir)


def outcome(run_dir):
    """Return the files and the state of the last checkpoint, and the result without the rung."""
    manifest = read_manifest(find(run_dir))
    result = json.loads((run_dir / "result.json").read_text())
    return manifest.files, manifest.state, result


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    for name, config in VARIANTS.items():
        train(config, folder / name)
    return {name: outcome(folder / name) for name in VARIANTS}


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
def test_paused_run_continues_as_if_it_had_not_paused(variant, undisturbed, tmp_path_factory):
    last = undisturbed[variant][2]["step"]

    @settings(max_examples=examples(15), deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.sets(st.integers(1, STEPS - 1), min_size=1, max_size=3), st.sampled_from(sorted(UNITS)), st.booleans())
    def check(steps, unit, is_repeated):
        run_dir = tmp_path_factory.mktemp("run")
        for number, step in enumerate(sorted(steps), start=1):
            pause_at(run_dir, number, UNITS[unit](step))
            for _ in range(1 + is_repeated):
                result = train(VARIANTS[variant], run_dir).result
            status = read_status(run_dir)
            if step >= last:
                assert (status["state"], result["status"], result["step"]) == ("finished", "finished", last)
                continue
            assert (status["state"], result["status"], result["step"], result["rung"]) == (
                "paused",
                "paused",
                step,
                number,
            )
            value = result["val_loss"]
            assert status["reason"] == f"rung {number} at {step} step{'s' * (step != 1)}: val_loss {value:.4g}"
            assert [record["val_loss"] for record in read_metrics(run_dir) if "val_loss" in record][-1] == value
        pause_at(run_dir, 4, None)
        train(VARIANTS[variant], run_dir)
        assert outcome(run_dir) == undisturbed[variant]

    check()


def test_run_that_pauses_is_under_the_schedule_of_its_whole_length(tmp_path):
    train(CONFIG, tmp_path / "whole")
    pause_at_folder = tmp_path / "paused"
    pause_at_folder.mkdir()
    pause_at(pause_at_folder, 1, "5")
    train(CONFIG, pause_at_folder)
    rates = {name: [r["lr"] for r in read_metrics(tmp_path / name) if "lr" in r] for name in ("whole", "paused")}
    assert rates["paused"] == rates["whole"][:5]


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ("12", "is 12 steps, but the run has only 12; the first rung must be before its end"),
        ("1 run", "is 1 run, 12 steps, but the run has only 12"),
        ("3 samples", "is 3 samples, 0.38 of an optimizer step"),
        ("soon", "'soon' is not a duration"),
        ("0", "is 0 but must be above 0"),
        ("5 tokens", "samples of this data have no tokens"),
    ],
)
def test_first_rung_that_does_not_fit_the_run_is_refused(tmp_path, at, message):
    pause_at(tmp_path, 1, at)
    with pytest.raises(ConfigError, match=message):
        train(CONFIG, tmp_path)


def test_damaged_rung_file_is_refused(tmp_path):
    (tmp_path / "rung.json").write_text('{"number": "1"}')
    with pytest.raises(ConfigError, match=r"rung.json is not valid for a search of foundry: .*; remove that file"):
        train(CONFIG, tmp_path)


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(1, 512))
def test_rung_in_tokens_is_reached_at_the_first_step_with_that_many_tokens(rung, tokens, tokens_per_sample):
    sizes = BatchSizes.constant(1)
    budget = Budget(total_samples=10**6, batch_sizes=sizes, samples_per_epoch=10, tokens_per_sample=tokens_per_sample)
    pause = Pause(rung=1, at=Interval.parse(f"{rung} tokens", budget), metric="val_loss")
    samples = tokens // tokens_per_sample
    counted = Progress(samples_per_epoch=10, tokens_per_sample=None, steps=samples, samples=samples, tokens=tokens)
    assert pause.is_reached(counted) == (tokens >= rung)
    counted.tokens = None
    assert pause.is_reached(counted) == (samples * tokens_per_sample >= rung)
