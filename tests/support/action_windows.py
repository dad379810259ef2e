"""Synthetic policy data: action chunks of sines whose phase follows from the state."""

import torch
from torch.utils.data import Dataset

from foundry.data.splits import DataSplits


class Windows(Dataset):
    """Action chunks that depend on the state; sample i has i % horizon padded actions, which are NaN.

    Random images and instructions are included if `sizes` has their sizes; the instruction length depends on i.
    """

    def __init__(self, num_samples, sizes, seed):
        generator = torch.Generator().manual_seed(seed)
        steps, horizon = sizes["num_observations"], sizes["horizon"]
        self.state = torch.randn(num_samples, steps, sizes["state_dim"], generator=generator)
        turns = torch.linspace(0, 3, horizon)[:, None] * torch.arange(1, sizes["action_dim"] + 1)
        self.actions = (turns + self.state[:, -1:, :1]).sin()
        self.is_padded = torch.arange(horizon) >= horizon - torch.arange(num_samples)[:, None] % horizon
        self.actions[self.is_padded] = torch.nan
        self.names = ["state", "actions", "is_padded"]
        if (size := sizes.get("image_size")) is not None:
            shape = (num_samples, steps, 3, size, size)
            self.images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
            self.names.append("images")
        if (length := sizes.get("instruction_tokens")) is not None:
            words = torch.randint(sizes["vocab_size"], (num_samples, length), generator=generator)
            self.instruction = words.masked_fill(torch.arange(length) > torch.arange(num_samples)[:, None] % length, -1)
            self.names.append("instruction")

    def __len__(self):
        return len(self.state)

    def __getitem__(self, index):
        return {name: getattr(self, name)[index] for name in self.names}


def windows(*, seed, **sizes):
    return DataSplits(train=Windows(96, sizes, 1), validation=Windows(19, sizes, 2), fingerprint="windows")
