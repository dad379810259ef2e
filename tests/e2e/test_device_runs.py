"""Whole runs on the CPU and on a GPU: unusable GPUs, TF32, and bit-identical repeated and resumed runs."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.devices import DEVICES, runs_on
from support.run_events import EndsAfter, Interrupted
from support.tiny import TINY_DIT, TINY_LM

from foundry.commands.library import compose, run
from foundry.config import environment
from foundry.models.transformer import Transformer
from foundry.parallel import device
from foundry.run_dir.checkpoints import list_checkpoints
from foundry.tracking.metrics_file import read_metrics

SETTINGS = [
    "hparams.deterministic=true",
    "hparams.max_steps=6",
    "hparams.ema_decay=0.9",
    "checkpoint.interval=3",
    "evaluation.interval=3",
    "tracking=none",
    "tracking.log_every_n_steps=1",
]


def outcome(run_dir):
    """Return the losses of all steps, the tensors of the last checkpoint (optimizer included) and the samples."""
    losses = {row["step"]: row["loss"] for row in read_metrics(run_dir / "metrics.jsonl") if "loss" in row}
    last = list_checkpoints(run_dir)[0]
    tensors = {}
    for file in sorted(last.glob("*.safetensors")):
        tensors |= load_file(file)
    return losses, tensors, {f.name: f.read_bytes() for f in (run_dir / "plots").glob("samples_*")}


def assert_same(ours, theirs):
    assert ours[0] == theirs[0]
    assert ours[1].keys() == theirs[1].keys()
    assert all(torch.equal(ours[1][name], theirs[1][name]) for name in theirs[1])
    assert ours[2] == theirs[2]


@pytest.fixture
def unusable_gpu(monkeypatch):
    """Simulate a GPU of this machine that torch cannot use."""
    unusable = [Path("/dev/nvidia0")]
    for module in (device, environment):
        monkeypatch.setattr(module, "gpu_files", lambda: unusable)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)


def assert_refused(run_command, module, words):
    _, err = run_command(*words, module=module, code=2)
    assert err.startswith("device: is auto and this machine has a GPU (/dev/nvidia0), but torch "), (module, err)


def test_run_refuses_a_gpu_that_torch_cannot_use_before_training(run_command, unusable_gpu):
    assert_refused(run_command, "foundry", TINY_LM)
    out, _ = run_command(*TINY_LM, "device=cpu", "hparams.max_steps=1", "hydra.run.dir=run")
    assert out.startswith("device ")
    assert "  cpu, " in out.splitlines()[0]


@pytest.mark.long
def test_every_command_refuses_a_gpu_that_torch_cannot_use(run_command, lm, unusable_gpu):
    run_dir, _, _ = lm
    commands = {
        "foundry.plan": TINY_LM,
        "foundry.lr_find": TINY_LM,
        "foundry.eval": [f"run={run_dir}", "out=eval.json"],
        "foundry.sample": [f"run={run_dir}", "out=text"],
    }
    for module, words in commands.items():
        assert_refused(run_command, module, words)
    assert not (run_command.cwd / "text.txt").exists()
    run_command(f"run={run_dir}", "out=text", "max_new_tokens=4", "device=cpu", module="foundry.sample")
    assert (run_command.cwd / "text.txt").exists()


@pytest.mark.long
def test_every_command_computes_a_tf32_run_in_tf32(run_command, monkeypatch):
    forward, seen = Transformer.forward, []

    def noting(*arguments, **named):
        seen.append((torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32))
        return forward(*arguments, **named)

    monkeypatch.setattr(Transformer, "forward", noting)
    run = [*TINY_LM, "precision=fp32", "precision.tf32=true", "hparams.max_steps=2", "hydra.run.dir=run"]
    commands = {
        "foundry": run,
        "foundry.lr_find": [*run[:-1], "lr_find.steps=10", "lr_find.min=1e-5", "hydra.run.dir=find"],
        "foundry.eval": ["run=run"],
        "foundry.sample": ["run=run", "max_new_tokens=4"],
    }
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    for module, words in commands.items():
        seen.clear()
        run_command(*words, module=module)
        assert set(seen) == {(True, True)}, module
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before


@pytest.mark.long
@pytest.mark.parametrize("device_type", DEVICES)
@pytest.mark.parametrize("model", [TINY_LM, TINY_DIT], ids=["transformer", "dit"])
def test_repeated_and_resumed_runs_are_bit_identical(model, device_type, tmp_path, monkeypatch):
    with runs_on(device_type, monkeypatch):
        config = compose([*model, *SETTINGS])
        run(config, tmp_path / "once")
        run(config, tmp_path / "twice")
        with pytest.raises(Interrupted):
            run(config, tmp_path / "resumed", observers=[EndsAfter(5)])
        run(config, tmp_path / "resumed")
    once = outcome(tmp_path / "once")
    assert len(once[0]) == 6
    assert len(once[2]) == 2
    assert_same(outcome(tmp_path / "twice"), once)
    assert_same(outcome(tmp_path / "resumed"), once)
