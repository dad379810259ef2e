"""Run directories of earlier versions are opened, continued and exported by this version.

`tests/stored/run-0.1` was written by `python -m foundry` with `WORDS` and `hparams.max_steps=4` on a CPU, and is stored
without logs, plots and the files for Hydra. A later version adds its own directory and changes no existing one.
"""

import json
import shutil
from pathlib import Path

import pytest
from support.checkpoint_parts import rewrite_manifest

from foundry.config.record.frozen import load_config

STORED = Path(__file__).parents[1] / "stored"
WORDS = [
    *("data=arithmetic", "data.form=text", "data.vocab_size=257", "data.num_rows=2000", "data.seq_len=32"),
    *("model.hidden_size=16", "model.intermediate_size=32", "model.num_layers=1", "model.num_heads=2"),
    *("model.num_kv_heads=2", "optimizer=adamw", "precision=fp32", "hparams.global_batch_size=4"),
    *("hparams.per_gpu_batch_size=4", "hparams.ema_decay=0.9", "scheduler.horizon=6", "scheduler.warmup=1"),
    *("tracking=none", "tracking.plots=false", "tracking.log_every_n_steps=1", "evaluation.max_samples=16"),
    *("objective.sample_tokens=8", "checkpoint.interval=2", "checkpoint.keep_last=1", "hydra.run.dir=run"),
]
LOSSES = [5.340625286102295, 5.330583095550537]
"""Losses of steps 5 and 6, computed by the version that wrote the directory."""
VAL_LOSS = 5.333653211593628


@pytest.fixture
def stored(run_command):
    shutil.copytree(STORED / "run-0.1", run_command.cwd / "run", symlinks=True)
    return run_command.cwd / "run"


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_stored_finished_run_is_not_trained_again(run_command, stored):
    before = (stored / "metrics.jsonl").read_text()
    run_command(*WORDS, "hparams.max_steps=4")
    assert (stored / "metrics.jsonl").read_text() == before


def test_stored_run_continues_as_in_the_version_that_wrote_it(run_command, stored):
    run_command(*WORDS, "hparams.max_steps=6")
    found = [record["loss"] for record in records(stored) if "loss" in record]
    assert found[4:] == pytest.approx(LOSSES, rel=2e-6)
    assert json.loads((stored / "result.json").read_text())["val_loss"] == pytest.approx(VAL_LOSS, rel=2e-6)


def test_stored_run_is_evaluated_sampled_exported_and_used_as_base(run_command, stored):
    own = json.loads((stored / "result.json").read_text())["val_loss"]
    run_command("run=run", "max_samples=16", "out=measured.json", module="foundry.eval")
    assert json.loads((run_command.cwd / "measured.json").read_text())["loss"] == pytest.approx(own, rel=2e-6)
    run_command("run=run", "prompt='1+1'", "max_new_tokens=4", "out=drawn", module="foundry.sample")
    run_command("run=run", "out=exported", module="foundry.export")
    assert (run_command.cwd / "exported" / "model.safetensors").is_file()
    words = [*WORDS[1:5], "data=arithmetic", "model=base", "model.path=run", "debug=fast", "precision=fp32"]
    run_command(*words, "tracking=none", "hydra.run.dir=started")
    assert records(run_command.cwd / "started")[0]["loss"] < 5.5  # randomly initialized weights start at 5.56


def numbered_interval(folder, interval):
    """Rewrite evaluation.interval of a run directory as a plain number, as builds before the release of 0.1 did."""
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("interval: 0.25 run", f"interval: {interval}"))
    checkpoint = folder / "checkpoints" / "latest"
    recorded = json.loads((checkpoint / "manifest.json").read_text())["config"]
    recorded["evaluation"]["interval"] = interval
    rewrite_manifest(checkpoint, config=recorded)


@pytest.mark.long
def test_stored_run_with_torchcompile_auto_continues_without_compiling(run_command, stored):
    config = stored / "config.yaml"
    config.write_text(config.read_text().replace("torchcompile: false", "torchcompile: auto"))
    checkpoint = stored / "checkpoints" / "latest"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["config"]["hparams"]["torchcompile"] = "auto"
    state = manifest["state"] | {"compiling": {"compiled": True}}
    rewrite_manifest(checkpoint, config=manifest["config"], state=state)
    assert load_config(stored).hparams.torchcompile is False  # sweep jobs read their settings this way
    run_command(*WORDS, "hparams.max_steps=6")
    assert "resumed with hparams.torchcompile: auto -> False" in (stored / "foundry.log").read_text()
    found = [record["loss"] for record in records(stored) if "loss" in record]
    assert found[4:] == pytest.approx(LOSSES, rel=2e-6)
    assert "compiling" not in json.loads((checkpoint / "manifest.json").read_text())["state"]


def evaluated(folder):
    return [record["step"] for record in records(folder) if "val_loss" in record]


@pytest.mark.long
def test_stored_run_with_a_numeric_evaluation_interval_needs_epoch_steps(run_command, stored):
    numbered_interval(stored, 5)
    assert load_config(stored).evaluation.interval == "5 epoch_steps"  # sweep jobs read their settings this way
    number = [*WORDS, "hparams.max_steps=6", "evaluation.interval=5"]
    _, stderr = run_command(*number, code=2)
    assert "evaluation.interval: is 5, which counts steps of the run, but an earlier version" in stderr
    assert "set '5 epoch_steps' to keep that, or '5 steps'" in stderr
    before = evaluated(stored)
    run_command(*WORDS, "hparams.max_steps=6", "evaluation.interval=5 epoch_steps")
    assert evaluated(stored) == [*before, 5, 6]
