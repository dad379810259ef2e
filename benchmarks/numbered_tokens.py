"""Data of resume_fidelity.py: rows of random tokens; the first token of a row is the row's number."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from foundry.data.splits import DataSplits


def numbered_rows(num_rows: int, length: int, vocab_size: int, *, seed: int = 0) -> Tensor:
    """Return the rows, (num_rows, length) int64.

    Args:
        num_rows: number of rows, at most the size of the vocabulary.
        length: tokens of a row.
        vocab_size: size of the vocabulary; its last two tokens, the special ones of the tokenizer, occur in no row.
        seed: seed of the random tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(vocab_size - 2, (num_rows, length), generator=generator)
    rows[:, 0] = torch.arange(num_rows)
    return rows


def build_numbered_tokens(*, seed: int, num_samples: int, seq_len: int, vocab_size: int) -> "DataSplits":
    """Return rows for training and two held-out rows, for foundry.

    Args:
        seed: seed of the held-out rows.
        num_samples: number of training rows.
        seq_len: tokens of a row; the last one is only a target.
        vocab_size: size of the vocabulary.
    """
    from random_tokens import Rows

    from foundry.data.splits import DataSplits

    return DataSplits(
        train=Rows(numbered_rows(num_samples, seq_len, vocab_size)),
        validation=Rows(numbered_rows(2, seq_len, vocab_size, seed=seed + 1)),
        fingerprint=f"numbered tokens {num_samples} {seq_len} {vocab_size}",
        tokens_per_sample=seq_len - 1,
    )
