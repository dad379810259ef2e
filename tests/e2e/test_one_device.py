"""Whole runs on one device, the CPU and a GPU: samples, MFU, deterministic bits, signals and compiled blocks."""

import logging
import signal
import warnings
from functools import partialmethod

import pytest
import torch
from support.devices import DEVICES, runs_on
from support.outcome import losses, status, weights
from support.tiny import TINY_LM
from torch import nn

from foundry.commands.library import compose, run
from foundry.parallel.compilation import count_graphs
from foundry.run_dir.checkpoints import find
from foundry.tracking.metrics_file import read_metrics
from foundry.training.throughput import peak_flops

pytestmark = pytest.mark.long

SETTINGS = ["hparams.ema_decay=0.9", "tracking=none", "tracking.log_every_n_steps=1"]
DETERMINISTIC = "hparams.deterministic=true"


def assert_same_end(ours, theirs):
    """Compare the losses of all steps and the tensors of the last checkpoint (model, optimizer and averages)."""
    assert losses(ours) == losses(theirs)
    tensors, expected = weights(ours), weights(theirs)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def samples_of(run_dir):
    """Return the texts sampled at each evaluation, by file name."""
    return {path.name: path.read_text() for path in run_dir.rglob("samples_*.txt")}


@pytest.mark.parametrize("device", DEVICES)
def test_run_with_samples_logs_no_warnings_and_device_metrics(device, tmp_path, monkeypatch, caplog):
    """On a GPU, the run has the default model of `python -m foundry`, and its MFU is checked if the peak is known."""
    model = TINY_LM if device == "cpu" else []
    overrides = ["hparams.max_steps=20", "evaluation.interval='10 steps'", "tracking.log_every_n_steps=5"]
    caplog.set_level(logging.WARNING)
    with runs_on(device, monkeypatch), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = compose([*model, *overrides, "tracking.mlflow=false"])
        run(config, tmp_path / "run")
    assert [str(warning.message) for warning in caught if "foundry" in warning.filename] == []
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert len(samples_of(tmp_path / "run")) >= 2
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert rows[-1]["loss"] < rows[0]["loss"]
    if device == "cpu":
        assert not any("mfu" in row for row in rows)
        return
    assert all(row["peak_memory_bytes"] > 0 for row in rows)
    if peak_flops(torch.cuda.get_device_name(), config.precision.mode) is not None:
        assert all(0 < row["mfu"] < 1 for row in rows[1:])


@pytest.mark.parametrize("device", DEVICES)
def test_deterministic_runs_after_a_plain_run_are_bit_identical(device, tmp_path, monkeypatch):
    """The plain run comes first, since libraries choose their workspaces at first use."""
    words = [*TINY_LM, *SETTINGS, "hparams.max_steps=6", "evaluation.interval='3 steps'"]
    with runs_on(device, monkeypatch):
        run(compose(words), tmp_path / "plain")
        config = compose([*words, DETERMINISTIC])
        run(config, tmp_path / "once")
        run(config, tmp_path / "twice")
    assert_same_end(tmp_path / "twice", tmp_path / "once")
    samples = samples_of(tmp_path / "once")
    assert len(samples) == 2
    assert samples == samples_of(tmp_path / "twice")


@pytest.mark.parametrize("device", DEVICES)
def test_sigterm_during_asynchronous_saves_resumes_bit_for_bit(shell, device):
    """Checkpoints are written in the background; every second step begins one."""
    variables = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    words = [*TINY_LM, *SETTINGS, DETERMINISTIC, "evaluation.write_samples=false"]
    words += ["hparams.max_steps=24", "checkpoint.interval='2 steps'"]
    shell.run(*words, "hydra.run.dir=whole", variables=variables)
    process = shell.start(*words, "hydra.run.dir=run", variables=variables)
    shell.wait_for_steps(process, shell.cwd / "run", 5)
    process.send_signal(signal.SIGTERM)
    _, stderr = shell.finish(process, code=143)
    stopped = status(shell.cwd / "run")
    assert (stopped["state"], stopped["reason"]) == ("stopped", "SIGTERM"), stderr
    assert find(shell.cwd / "run", "last").name == f"step_{stopped['step']:08d}"
    shell.run(*words, "hydra.run.dir=run", variables=variables)
    assert_same_end(shell.cwd / "run", shell.cwd / "whole")


class Graphs:
    """An observer that records the number of graphs compiled up to each step."""

    def __init__(self):
        self.after, self.before = {}, count_graphs()

    def on_start(self, event):
        pass

    on_evaluation = on_end = on_start

    def on_step(self, event):
        self.after[event.step] = count_graphs() - self.before


@pytest.mark.parametrize("device", DEVICES)
def test_torchcompile_compiles_blocks_once_and_matches_eager_losses(device, tmp_path, monkeypatch):
    """All blocks share one training graph, and later steps compile no more graphs."""
    if device == "cpu":  # the same graphs, without a minute of C++ compilation
        monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
        monkeypatch.setenv("CXX", "true")
    words = [*TINY_LM, *SETTINGS, "hparams.max_steps=6", "evaluation.interval=null", "evaluation.write_samples=false"]
    words.append("precision=fp32" if device == "cpu" else "precision=amp_bf16")
    torch.compiler.reset()
    graphs = Graphs()
    with runs_on(device, monkeypatch):
        run(compose(words), tmp_path / "eager")
        run(compose([*words, "hparams.torchcompile=true"]), tmp_path / "compiled", observers=[graphs])
    assert graphs.after == dict.fromkeys(range(1, 7), 1)
    tolerance = 1e-5 if device == "cpu" else 2e-3
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "eager"), rel=tolerance)
