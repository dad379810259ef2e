"""User-defined parts for the parity tests."""

import torch
from support.warm import warm_ranks
from torch.utils.data import Dataset

from foundry.checkpoint.tensors import load_weights
from foundry.data.splits import DataSplits
from foundry.engine.train import train
from foundry.launch.local import run_local
from foundry.parts.model import build_model
from foundry.run_dir.checkpoints import find


class RaggedTokens(Dataset):
    """A dataset whose sequence i has i % (seq_len + 1) valid targets; none for index 0, seq_len + 1, ..."""

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


def weights(config, run_dir, ema=False):
    """Return the weights of a run's last checkpoint, or its averaged weights with `ema`."""
    model = build_model(config)
    load_weights(find(run_dir), model, ema=ema)
    return model.state_dict()


def differences(one, other):
    """Return |a - b| / |a| of the worst tensor, in the L2 norm and by its largest element."""
    assert one.keys() == other.keys()
    pairs = [(one[name].float(), other[name].float()) for name in one]
    floor = 1e-8  # For tensors that are zero.
    l2 = max(float((a - b).norm() / a.norm().clamp(min=floor)) for a, b in pairs)
    return l2, max(float((a - b).abs().max() / a.abs().max().clamp(min=floor)) for a, b in pairs)


def run_all(jobs):
    """Train jobs (number of processes, (configuration, run directory)); jobs with the same number share one launch."""
    for processes in (1, 2, 4):
        own = [job for number, job in jobs if number == processes]
        if processes == 1:
            run_each(own)
        elif own:
            with warm_ranks():
                run_local(processes, run_each, own)


def run_each(jobs):
    """Train each (configuration, run directory) in turn, on all ranks that call this function; return the metrics."""
    return [train(config, run_dir).metric for config, run_dir in jobs]
