"""Runs with the options of Muon: momentum by samples, and a resumed run that equals an uninterrupted one."""

import pytest
from support.composition import configure
from support.outcome import losses, outcome
from support.tiny import TINY_LM

from foundry.engine.train import train
from foundry.training import step

WORDS = [
    *TINY_LM,
    "precision=fp32",
    "tracking=none",
    "tracking.log_every_n_steps=1",
    "evaluation.interval=null",
    "evaluation.max_samples=4",
    "evaluation.write_samples=false",
    "hparams.batch_ramp={start: 4, increment: 4, over_samples: 8}",
    "hparams.global_batch_size=8",
    "hparams.per_gpu_batch_size=2",
    "scheduler.warmup='0'",
    "scheduler.horizon='6'",
    "optimizer=muon",
    "optimizer.weight_decay=0.1",
]
WARMUP = ["optimizer.momentum_warmup_start=0.5", "optimizer.momentum_warmup='4'"]
OPTIONS = {
    "momentum_warmup": WARMUP,
    "cautious_weight_decay": ["optimizer.cautious_weight_decay=true"],
    "row_variance": ["optimizer.row_variance=true"],
}


def trained(words, run_dir, *lengths):
    """Return the losses and the checksums of the last checkpoint, after a start of the run to each number of steps."""
    for steps in lengths:
        train(configure(*WORDS, *words, f"hparams.max_steps={steps}"), run_dir)
    return losses(run_dir), outcome(run_dir)["files"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Losses and checksums of an uninterrupted run without options."""
    return trained([], tmp_path_factory.mktemp("plain"), 6)


@pytest.mark.parametrize("name", OPTIONS)
def test_run_with_an_option_of_muon_resumes_bit_for_bit(plain, tmp_path, name):
    whole = trained(OPTIONS[name], tmp_path / "whole", 6)
    assert trained(OPTIONS[name], tmp_path / "resumed", 3, 6) == whole
    assert whole[0] != plain[0]


def test_momentum_of_a_ramped_run_follows_the_samples(tmp_path, monkeypatch):
    momenta = []

    def set_schedule(optimizers, *values):
        apply(optimizers, *values)
        momenta.append(optimizers[0].param_groups[0]["momentum"])

    apply = step.set_schedule
    monkeypatch.setattr(step, "set_schedule", set_schedule)
    train(configure(*WORDS, *WARMUP, "hparams.max_steps=6"), tmp_path)
    # Steps of 4, 4, 8, 8, ... samples; the first four have 24.
    assert momenta == pytest.approx([0.5 + 0.45 * samples / 24 for samples in (4, 8, 16, 24, 24, 24)])
    assert momenta[3:] == [0.95] * 3
