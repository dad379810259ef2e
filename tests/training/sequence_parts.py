"""A tiny task whose runs take milliseconds, with points for killing a run."""

import os
import signal

import torch
from torch import nn
from torch.utils.data import Dataset

from foundry.core.protocols import LossSum
from foundry.data.splits import DataSplits

WIDTH = 3
SPIKE = 27
"""Index of the sample with an extreme loss, if `has_spike`."""


class Killed(BaseException):
    """Simulates the death of the process."""


class Trap:
    """Kills the run, or sends it SIGTERM, when it reaches a place for the n-th time."""

    def __init__(self):
        self.place, self.left = "", 0

    def set(self, place, times):
        self.place, self.left = place, times

    def spring(self, place):
        if place != self.place.removeprefix("stop at "):
            return
        self.left -= 1
        if self.left == 0:
            if self.place.startswith("stop at "):
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                raise Killed(place)


TRAP = Trap()


class Whole(Dataset):
    """Integers below 8, so that sums of gradients are exact in any order."""

    def __init__(self, num_samples, seed, has_spike):
        self.x = torch.randint(8, (num_samples, WIDTH), generator=torch.Generator().manual_seed(seed)).float()
        if has_spike:
            self.x[SPIKE] = 512.0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        TRAP.spring("read")
        return {"x": self.x[index]}


def whole_numbers(*, seed, has_spike):
    return DataSplits(
        train=Whole(40, 1, has_spike), validation=Whole(5, 2, False), fingerprint="whole", tokens_per_sample=None
    )


class Linear(nn.Module):
    """A linear model with a buffer that counts the samples seen in training."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.seen += len(x)
        return x @ self.weight


class Sum:
    """The sum of the outputs. Its gradient is the sum of the samples, with random weights if `is_noisy`."""

    def __init__(self, *, is_noisy, loss_function="mse", z_loss_coefficient=0.0):
        self.is_noisy = is_noisy

    def num_valid(self, microbatch):
        return int((microbatch["position"] >= 0).sum())

    def loss(self, model, microbatch):
        x = microbatch["x"] * (microbatch["position"] >= 0)[:, None]
        if self.is_noisy and model.training:
            TRAP.spring("forward")
            x = x * torch.randint(1, 3, x.shape)
        return LossSum(model(x).sum())


class Watcher:
    """An observer whose calls are places where the run can be killed."""

    def on_start(self, event):
        TRAP.spring("start")

    def on_step(self, event):
        TRAP.spring("step")

    def on_evaluation(self, event):
        TRAP.spring("evaluation")

    def on_end(self, event):
        TRAP.spring("end")


class Guesses:
    """An evaluator that draws from torch's global generator."""

    def evaluate(self, model, context):
        return {"guess": float(torch.rand(()))}
