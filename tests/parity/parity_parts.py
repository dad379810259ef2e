"""Parts that the parity tests bring along, as a user would."""

import torch
from torch.utils.data import Dataset

from foundry.data.splits import DataSplits
from foundry.run import run


class RaggedTokens(Dataset):
    """Sequence i has i % (seq_len + 1) valid targets; every thirteenth has none."""

    def __init__(self, num_samples, seq_len, vocab_size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(vocab_size, (num_samples, seq_len + 1), generator=generator)
        self.seq_len = seq_len

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        targets = self.tokens[index, 1:].clone()
        targets[index % (self.seq_len + 1) :] = -100
        return {"tokens": self.tokens[index, :-1], "targets": targets}


def ragged_tokens(*, seed, seq_len, vocab_size):
    return DataSplits(
        train=RaggedTokens(96, seq_len, vocab_size, 1),
        validation=RaggedTokens(19, seq_len, vocab_size, 2),
        fingerprint="ragged",
        tokens_per_sample=seq_len,
    )


def run_each(jobs):
    """Train each (configuration, run directory) in turn, in the processes that call this together."""
    return [run(config, run_dir).metric for config, run_dir in jobs]
