"""Fixed-length samples cut from one long array of tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foundry.data.mapped_files import MapsFiles

TokenArray = NDArray[np.unsignedinteger[Any]]


class TokenSequences(MapsFiles):
    """Sample i is tokens[i * seq_len : (i + 1) * seq_len], and its targets the same one token later.

    Args:
        tokens: (num_tokens,) unsigned integers, usually memory-mapped.
        seq_len: tokens per sample.
    """

    def __init__(self, tokens: TokenArray, seq_len: int) -> None:
        self.tokens = tokens
        self.seq_len = seq_len

    def __len__(self) -> int:
        """Number of whole samples."""
        return max(0, len(self.tokens) - 1) // self.seq_len

    @property
    def dropped_tokens(self) -> int:
        """Tokens after the last whole sample, which no sample holds."""
        return len(self.tokens) - len(self) * self.seq_len

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One sample: tokens and targets, (seq_len,) int64 each."""
        return {name: value[0] for name, value in self.batch([index]).items()}

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Samples stacked: tokens and targets, (len(indices), seq_len) int64 each.

        Raises:
            IndexError: an index is out of range.
        """
        starts = np.asarray(indices, dtype=np.int64)
        if len(starts) and (starts.min() < 0 or starts.max() >= len(self)):
            raise IndexError(f"samples {starts.min()} to {starts.max()} of a dataset of {len(self)}")
        windows = self.tokens[starts[:, None] * self.seq_len + np.arange(self.seq_len + 1)].astype(np.int64)
        return {
            "tokens": torch.from_numpy(np.ascontiguousarray(windows[:, :-1])),
            "targets": torch.from_numpy(np.ascontiguousarray(windows[:, 1:])),
        }
