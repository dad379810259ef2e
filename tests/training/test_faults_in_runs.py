"""Loss spikes and non-finite numbers in complete runs."""

import itertools
import json
import logging
import time
from dataclasses import replace

import pytest
from support import composition
from support.examples import some_of
from support.run_events import EndsAfter, Interrupted

from foundry.checkpoint import writer
from foundry.commands.library import run
from foundry.engine.train import train
from foundry.run_dir.checkpoints import list_checkpoints, parse_step
from foundry.tracking.metrics_file import read_metrics
from foundry.training.guards import LossSpike, NonFiniteError
from foundry.training.throughput import Throughput

SMALL = [
    "hparams=diffusion",
    "model.hidden_size=16",
    "model.num_layers=1",
    "model.num_heads=1",
    "hparams.global_batch_size=8",
    "hparams.per_gpu_batch_size=8",
    "hparams.max_steps=40",
    "tracking.mlflow=false",
    "tracking.progress=false",
    "tracking.log_every_n_steps=1",
    "evaluation.write_samples=false",
    "evaluation.interval=null",
    "evaluation.max_samples=8",
    "checkpoint.interval=10",
]


@pytest.fixture
def configure(monkeypatch, request):
    """Return a function that composes a run with bad samples at given positions of the global order."""
    monkeypatch.syspath_prepend(request.path.parent)

    def words(*overrides, bad=(), not_a_number=False):
        config = composition.configure(*SMALL, *overrides)
        own = {"_target_": "spiky_objective.SpikyDiffusion", "bad_positions": list(bad), "not_a_number": not_a_number}
        return replace(config, objective={**vars(config.objective), **own})

    return words


def steps_of(run_dir):
    return [record for record in read_metrics(run_dir) if "loss" in record]


GUARDED = ["guard.spike_zscore=20", "guard.spike_window=16"]


def test_rollback_after_a_spike_skips_its_data(configure, tmp_path, caplog):
    config = configure(*GUARDED, "guard.spike_action=rollback", bad=[8 * 24 + 3])  # Read in step 25.
    with caplog.at_level(logging.WARNING):
        result = train(config, tmp_path / "run").result
    assert (result["status"], result["step"], result["samples"]) == ("finished", 40, 320)
    assert "step 25: the loss" in caplog.text
    assert "rolled back to step 20, skipping its data" in caplog.text
    records = steps_of(tmp_path / "run")
    assert [record["step"] for record in records] == [*range(1, 41)]
    assert max(record["loss"] for record in records) < 20
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "latest" / "manifest.json").read_text())
    # Steps 21 to 25 had been read before the rollback to step 20.
    assert manifest["state"]["source"] == {"samples": 320, "skipped": 40}


@pytest.fixture
def ticks(monkeypatch):
    """Replace the clock of the throughput by one that advances a second per call."""
    monkeypatch.setitem(Throughput.__init__.__kwdefaults__, "clock", map(float, itertools.count()).__next__)


def rates(run_dir):
    return {record["step"]: record["samples_per_second"] for record in steps_of(run_dir)}


def test_throughput_after_a_rollback_counts_from_the_checkpoint(configure, tmp_path, ticks):
    config = configure(*GUARDED, "guard.spike_action=rollback", bad=[8 * 24 + 3])
    train(config, tmp_path / "run")
    # Each log covers at least one second and at most 8 samples.
    assert all(0 < rate <= 8 for rate in rates(tmp_path / "run").values())


@pytest.mark.long
@pytest.mark.parametrize("every", some_of([1, 5], 5))
def test_throughput_after_a_resume_counts_from_the_checkpoint(configure, tmp_path, ticks, every):
    logged = f"tracking.log_every_n_steps={every}"
    train(configure("hparams.max_steps=20", "scheduler.horizon='40'", logged), tmp_path / "run")
    before = rates(tmp_path / "run")
    train(configure("scheduler.horizon='40'", logged), tmp_path / "run")
    after = {step: rate for step, rate in rates(tmp_path / "run").items() if step > 20}
    assert len(after) == 20 // every
    assert all(0 < rate <= 8 * every for rate in [*before.values(), *after.values()])


def test_spike_without_a_checkpoint_ends_the_run(configure, tmp_path, caplog):
    config = configure(*GUARDED, "guard.spike_action=rollback", "checkpoint.interval=30", bad=[8 * 24])
    with pytest.raises(LossSpike):
        train(config, tmp_path / "run")
    assert "there is no checkpoint to roll back to" in caplog.text
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"


def test_repeated_rollbacks_to_one_step_end_the_run(configure, tmp_path, caplog):
    config = configure(*GUARDED, "guard.spike_action=rollback", "guard.max_skips=2", bad=range(8 * 24, 8 * 60))
    with pytest.raises(LossSpike):
        train(config, tmp_path / "run")
    assert "rolling back to step 20 2 times did not help" in caplog.text


def test_update_of_a_spike_is_skipped(configure, tmp_path, caplog):
    result = train(configure(*GUARDED, bad=[8 * 24 + 3]), tmp_path / "run").result
    assert (result["status"], result["step"]) == ("finished", 40)
    assert "step 25: the loss" in caplog.text
    assert "its update is skipped, 1 in a row of at most 3 (samples 192 to 199 of the global order)" in caplog.text


def test_nan_loss_stops_the_run_or_is_skipped(configure, tmp_path, caplog):
    with pytest.raises(NonFiniteError, match="step 5: the loss on rank 0 is not finite"):
        train(configure(bad=[35], not_a_number=True), tmp_path / "stopped")
    result = train(configure("guard.non_finite=skip", bad=[35], not_a_number=True), tmp_path / "skipped").result
    assert result["step"] == 40
    assert "samples 32 to 39 of the global order" in caplog.text


def test_early_stopped_run_stays_finished_on_restart(configure, tmp_path):
    stopping = ["evaluation.interval=2", "evaluation.early_stopping.patience=1", "hparams.lr=1e-9"]
    units = ["evaluation.early_stopping.unit=evaluations", "scheduler.min_lr=0"]
    config = configure(*stopping, *units)
    result = train(config, tmp_path / "run").result
    assert result["step"] < 40
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "finished"
    assert "has not improved" in status["reason"]
    assert train(config, tmp_path / "run").result == result


def test_failed_run_finishes_its_pending_save(configure, tmp_path, monkeypatch):
    def slowly(*args):
        time.sleep(1)
        return write_shard(*args)

    write_shard = writer.write_shard
    monkeypatch.setattr(writer, "write_shard", slowly)
    config = configure("hparams.max_steps=12")
    with pytest.raises(Interrupted):
        run(config, tmp_path / "run", observers=[EndsAfter(11)])
    assert [parse_step(folder) for folder in list_checkpoints(tmp_path / "run")] == [10]
