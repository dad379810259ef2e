"""Means of sums and counts, read from a device at once."""

from unittest.mock import patch

import torch
from support.composition import configure
from support.devices import Operations
from support.tiny import SMALL_LM

from foundry.commands.library import run
from foundry.core.protocols import Mean
from foundry.training.metric_sums import read_means
from foundry.training.trainer import Trainer


def test_means_are_quotients_of_sums_and_counts():
    third = torch.tensor(1.0) / 3
    metrics = {
        "counted on the host": Mean(torch.tensor(7.0), 2),
        "counted on the device": Mean(torch.tensor(5.0), torch.tensor(4)),
        "rounded": Mean(torch.tensor(1.0), torch.tensor(3.0)),
        "wide": Mean(torch.tensor(1.0, dtype=torch.float64), 3),
        "nothing on the host": Mean(torch.tensor(0.0), 0),
        "nothing on the device": Mean(torch.tensor(0.0), torch.tensor(0)),
    }
    means, numbers = read_means(metrics, third, torch.tensor(2.0, dtype=torch.bfloat16))
    assert means == {
        "counted on the host": 3.5,
        "counted on the device": 1.25,
        "rounded": third.item(),
        "wide": 1 / 3,
    }
    assert numbers == [third.item(), 2.0]
    assert read_means({}) == ({}, [])


def test_logged_step_reads_the_device_once(tmp_path):
    """One read gets the loss, the gradient norm and all metrics of a step."""
    reads, original, log = [], torch.Tensor.tolist, Trainer._log

    def tolist(tensor):
        reads.append(tensor.shape)
        return original(tensor)

    def watched(*args):
        with Operations() as operations, patch.object(torch.Tensor, "tolist", tolist):
            log(*args)
        assert operations.num_reads == 0

    config = configure(
        *SMALL_LM, "hparams.z_loss_coefficient=1e-4", "hparams.max_steps=2", "tracking=none", "checkpoint=none"
    )
    with patch.object(Trainer, "_log", watched):
        run(config, tmp_path / "run")
    assert reads == [(4,), (4,)]
