"""Whole runs on the CPU and on a GPU: the same bits twice, and after being resumed."""

import pytest
import torch
from safetensors.torch import load_file
from support.devices import DEVICES, runs_on
from support.run_events import EndsAfter, Interrupted
from support.tiny import TINY_DIT, TINY_LM

from foundry.library import compose, run
from foundry.run_dir.checkpoints import list_checkpoints
from foundry.tracking.metrics_file import read_metrics

SETTINGS = [
    "hparams.deterministic=true",
    "hparams.max_steps=6",
    "hparams.ema_decay=0.9",
    "checkpoint.interval=3",
    "evaluation.write_samples=false",
    "tracking=none",
    "tracking.log_every_n_steps=1",
]


def outcome(run_dir):
    """Losses of all steps, and the tensors of the last checkpoint, optimizer and averages included."""
    losses = {row["step"]: row["loss"] for row in read_metrics(run_dir / "metrics.jsonl") if "loss" in row}
    last = list_checkpoints(run_dir)[0]
    tensors = {}
    for file in sorted(last.glob("*.safetensors")):
        tensors |= load_file(file)
    return losses, tensors


def assert_same(ours, theirs):
    assert ours[0] == theirs[0]
    assert ours[1].keys() == theirs[1].keys()
    assert all(torch.equal(ours[1][name], theirs[1][name]) for name in theirs[1])


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", [TINY_LM, TINY_DIT], ids=["transformer", "dit"])
def test_the_same_bits_twice_and_after_an_interruption(model, device, tmp_path, monkeypatch):
    with runs_on(device, monkeypatch):
        config = compose([*model, *SETTINGS])
        run(config, tmp_path / "once")
        run(config, tmp_path / "twice")
        with pytest.raises(Interrupted):
            run(config, tmp_path / "resumed", observers=[EndsAfter(5)])
        run(config, tmp_path / "resumed")
    once = outcome(tmp_path / "once")
    assert len(once[0]) == 6
    assert_same(outcome(tmp_path / "twice"), once)
    assert_same(outcome(tmp_path / "resumed"), once)
