"""Data of language_model.py: rows of random tokens; some tokens are frequent."""

import torch
from torch import Tensor

from foundry.data.splits import DataSplits


class Rows:
    """Dataset of token rows and next tokens that reads whole microbatches, as foundry's own datasets do."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self.rows[index, :-1], "targets": self.rows[index, 1:]}

    def batch(self, indices: list[int]) -> dict[str, Tensor]:
        """Return tokens and targets, (batch, seq) int64 each."""
        return self[indices]  # type: ignore[index]


def build_random_tokens(*, seed: int, num_samples: int, seq_len: int, vocab_size: int) -> DataSplits:
    """Return `num_samples` training rows and four held-out rows, which depend only on these arguments."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(num_samples + 4, seq_len + 1, generator=generator)
    rows = (uniform.square() * vocab_size).long()
    return DataSplits(
        train=Rows(rows[4:]),
        validation=Rows(rows[:4]),
        fingerprint=f"random tokens {seed} {num_samples} {seq_len} {vocab_size}",
        tokens_per_sample=seq_len,
    )
