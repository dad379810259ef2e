"""Packing of the samples of a window into shared rows."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_KERNEL_TILE = 128
"""Largest number of tokens per thread block of FlashAttention."""

Pack = list[int]
"""Samples that share a row, in the order of the row; samples of n parts share n rows."""


def first_fit_decreasing(lengths: NDArray[np.int64], capacity: int) -> list[Pack]:
    """Put each sample, the longest first, into the first pack that has room for it (Johnson, 1973).

    A pack of samples with several parts, such as preference pairs, has as many rows as a sample has parts, and holds
    all parts of its samples. Each part of a sample, the longest first, goes into the row with the most room left; a
    sample of two parts therefore fits whenever the rows of the pack have room for both parts.

    Args:
        lengths: (samples,) or (samples, parts) int64, in tokens, each at most `capacity`.
        capacity: row length in tokens.

    Returns:
        The packs, as lists of sample indices; every rank computes the same packs from the same lengths.
    """
    parts = np.sort(lengths if lengths.ndim == 2 else lengths[:, None])[:, ::-1]
    packs, room = list[Pack](), np.full(parts.shape, capacity)
    for sample in np.argsort(-parts.sum(1), kind="stable").tolist():
        remaining = room[: len(packs) + 1].copy()  # room of each pack so far, and of a new one
        for length in parts[sample]:
            remaining[np.arange(len(remaining)), remaining.argmax(1)] -= length
        index = int((remaining >= 0).all(1).argmax())
        if index == len(packs):
            packs.append([])
        packs[index].append(sample)
        room[index] = remaining[index]
    return packs


def place_parts(lengths: Sequence[Sequence[int]], num_rows: int) -> list[list[tuple[int, int]]]:
    """Assign the parts of a pack's samples to rows, by the rule of `first_fit_decreasing`.

    Args:
        lengths: tokens of each part of each sample, in the order of the pack.
        num_rows: number of rows of the pack.

    Returns:
        For each row, the (sample, part) indices in it, in order; samples are numbered within the pack.
    """
    rows: list[list[tuple[int, int]]] = [[] for _ in range(num_rows)]
    filled = [0] * num_rows
    for sample, parts in enumerate(lengths):
        for part in sorted(range(len(parts)), key=lambda part: -parts[part]):
            row = filled.index(min(filled))
            rows[row].append((sample, part))
            filled[row] += parts[part]
    return rows


def find_bounds(documents: Tensor) -> dict[str, Tensor]:
    """Return the document boundaries of packed rows, in host memory, for variable-length attention kernels.

    Args:
        documents: (..., seq) int64, document id of each token, -1 for padding. Consecutive padding tokens count as one
            document.

    Returns:
        document_starts: (entries,) int32, index of the first token of each document in the flattened rows, then the
            total number of tokens. Empty documents are appended until the number of entries is a power of two plus
            one, so that microbatches have few different shapes.
        longest_document: () int64, tokens of the longest document, rounded up to a multiple of the kernel's tile.
    """
    rows = documents.flatten(0, -2).numpy()
    is_first = np.ones(rows.shape, dtype=bool)
    is_first[:, 1:] = rows[:, 1:] != rows[:, :-1]
    starts = np.flatnonzero(is_first)
    longest = int(np.diff(starts, append=rows.size).max())
    filled = np.full(2 ** (len(starts) - 1).bit_length() + 1, rows.size, dtype=np.int32)
    filled[: len(starts)] = starts
    return {
        "document_starts": torch.from_numpy(filled),
        "longest_document": torch.tensor(-(-longest // _KERNEL_TILE) * _KERNEL_TILE),
    }


def deal(packs: Sequence[Pack], *, per_gpu_batch_size: int, dp_rank: int, dp_size: int) -> Iterator[list[Pack]]:
    """Yield the packs of each microbatch of a rank; all ranks have equally many microbatches, of nearly equal size."""
    count = dp_size * -(-len(packs) // (per_gpu_batch_size * dp_size))
    for index in range(dp_rank, count, dp_size):
        yield list(packs[index::count]) or [[]]
