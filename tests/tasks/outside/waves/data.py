"""Data, model and objective of the task `waves`."""

import json
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from foundry.core.protocols import LossSum, Mean
from foundry.data.splits import DataSplits


@dataclass(frozen=True)
class Scale:
    overrides: ClassVar[tuple[str, ...]] = ()
    largest: float

    def to_json(self):
        return json.dumps({"largest": self.largest})

    @classmethod
    def from_json(cls, text):
        return cls(float(json.loads(text)["largest"]))

    def applied_to(self, data):
        return data


class Windows(torch.utils.data.Dataset):
    def __init__(self, values, window):
        self.values, self.window = values, window

    def __len__(self):
        return len(self.values) - self.window

    def __getitem__(self, index):
        end = index + self.window
        return {"values": self.values[index:end], "next": self.values[end]}


def waves(*, seed, hertz, period, window, cache_dir, num_workers):
    values = torch.sin(2 * math.pi * hertz * torch.arange(20.0 * period))
    split = len(values) * 3 // 4
    return DataSplits(
        train=Windows(values[:split], window),
        validation=Windows(values[split:], window),
        fingerprint=f"waves {hertz} {window}",
        kept={"scale.json": Scale(float(values.abs().max()))},
    )


class Filter(nn.Module):
    def __init__(self, window):
        super().__init__()
        self.linear = nn.Linear(window, 1)

    def forward(self, values):
        return self.linear(values).squeeze(-1)


class NextValue:
    metrics = ("error",)

    def num_valid(self, microbatch):
        return len(microbatch["next"])

    def loss(self, model, microbatch):
        difference = model(microbatch["values"]) - microbatch["next"]
        return LossSum(difference.square().sum(), {"error": Mean(difference.detach().abs().sum())})
