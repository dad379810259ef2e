"""Datasets of fixed-length sequences, cut from long arrays of tokens."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foundry.data.dataset import BatchDataset
from foundry.data.io.mapped_files import MapsFiles

TokenArray = NDArray[np.unsignedinteger[Any]]


class TokenSequences(MapsFiles, BatchDataset):
    """Dataset whose sample i is tokens[i * seq_len : (i + 1) * seq_len]; targets are shifted by one token.

    Args:
        tokens: (num_tokens,) unsigned integers, usually memory-mapped.
        seq_len: tokens per sample.
    """

    def __init__(self, tokens: TokenArray, seq_len: int) -> None:
        self.tokens = tokens
        self.seq_len = seq_len

    def __len__(self) -> int:
        """Return the number of complete samples."""
        return max(0, len(self.tokens) - 1) // self.seq_len

    @property
    def dropped_tokens(self) -> int:
        """Number of tokens after the last complete sample, including the last target of that sample."""
        return len(self.tokens) - len(self) * self.seq_len

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return `tokens` and `targets`, (len(indices), seq_len) int64 each.

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


class SequencesOfFiles(BatchDataset):
    """Concatenation of the sequences of several token arrays; no sequence spans two arrays.

    Args:
        parts: sequences of each array.
    """

    def __init__(self, parts: Sequence[TokenSequences]) -> None:
        self.parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    @classmethod
    def of(cls, arrays: Sequence[TokenArray], seq_len: int) -> "SequencesOfFiles":
        """Return the sequences of several token arrays."""
        return cls([TokenSequences(array, seq_len) for array in arrays])

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self._ends[-1])

    def num_tokens(self, indices: Sequence[int]) -> int | None:
        """Return the total tokens of these samples without padding, or None if no sample has padding."""
        counts = [part.num_tokens(offsets.tolist()) for part, _, offsets in self._by_part(indices)]
        return None if None in counts else sum(count for count in counts if count is not None)

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return `tokens` and `targets`, (len(indices), seq_len) int64 each.

        Raises:
            IndexError: an index is out of range.
        """
        empty = torch.empty(len(indices), self.parts[0].seq_len, dtype=torch.int64)
        batch = {"tokens": empty, "targets": empty.clone()}
        for part, rows, offsets in self._by_part(indices):
            for name, value in part.batch(offsets.tolist()).items():
                batch[name][torch.from_numpy(rows)] = value
        return batch

    def _by_part(self, indices: Sequence[int]) -> Iterator[tuple[TokenSequences, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield each part that has some of the samples, their places in `indices`, and their indices in the part."""
        samples = np.asarray(indices, dtype=np.int64)
        if len(samples) and (samples.min() < 0 or samples.max() >= len(self)):
            raise IndexError(f"samples {samples.min()} to {samples.max()} of a dataset of {len(self)}")
        part_indices = np.searchsorted(self._ends, samples, side="right")
        offsets = samples - np.concatenate([[0], self._ends])[part_indices]
        for part in np.unique(part_indices).tolist():
            rows = np.flatnonzero(part_indices == part)
            yield self.parts[part], rows, offsets[rows]


class Reordered(BatchDataset):
    """View of a dataset with its samples in another order.

    Args:
        dataset: the dataset.
        places: index in `dataset` of each sample of this view, (n,) int64.
    """

    def __init__(self, dataset: SequencesOfFiles, places: NDArray[np.int64]) -> None:
        self._dataset, self._places = dataset, places

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._places)

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return `tokens` and `targets`, (len(indices), seq_len) int64 each."""
        return self._dataset.batch(self._places[np.asarray(indices, dtype=np.int64)].tolist())
