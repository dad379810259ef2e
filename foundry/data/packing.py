"""Packing: which samples of a window share rows."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_KERNEL_TILE = 128
"""Tokens per thread block of FlashAttention, at most."""

Pack = list[int]
"""Samples that share a row, or as many rows as each has parts, in their order there."""


def first_fit_decreasing(lengths: NDArray[np.int64], capacity: int) -> list[Pack]:
    """Put each sample, the longest first, into the first pack that has room for it (Johnson, 1973).

    A sample of several parts, such as a pair, goes whole into a pack of as many rows: its parts, the longest first,
    each into the row with the most room left, which finds a place for two parts wherever there is one.

    Args:
        lengths: (samples,) or (samples, parts) int64, tokens, each at most `capacity`.
        capacity: tokens of a row.

    Returns:
        The packs, which depend on the lengths alone.
    """
    parts = np.sort(lengths if lengths.ndim == 2 else lengths[:, None])[:, ::-1]
    packs, room = list[Pack](), np.full(parts.shape, capacity)
    for sample in np.argsort(-parts.sum(1), kind="stable").tolist():
        left = room[: len(packs) + 1].copy()  # the last one is empty
        for length in parts[sample]:
            left[np.arange(len(left)), left.argmax(1)] -= length
        chosen = int((left >= 0).all(1).argmax())
        if chosen == len(packs):
            packs.append([])
        packs[chosen].append(sample)
        room[chosen] = left[chosen]
    return packs


def place_parts(lengths: Sequence[Sequence[int]], num_rows: int) -> list[list[tuple[int, int]]]:
    """Where the samples of a pack lie, as `first_fit_decreasing` has counted.

    Args:
        lengths: tokens of each part of each sample, in the order of the pack.
        num_rows: of the pack.

    Returns:
        Of each row the sample and the part, by their numbers, one after the other.
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
    """Return the bounds of the documents of packed rows, in host memory, for attention without a mask.

    Args:
        documents: (..., seq) int64, the number of each token's document, -1 for padding. A run of padding counts as a
            document.

    Returns:
        document_starts: (entries,) int32, the first token of each document of the flattened rows, then the number of
            all tokens. Their number is one more than a power of two, filled up with documents of no tokens at the end:
            microbatches of many sizes have few shapes.
        longest_document: () int64, tokens of the longest document, rounded up to a whole number of a kernel's tiles.
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
    """The packs of each of a rank's microbatches, which are as many on every rank and of nearly the same size."""
    count = dp_size * -(-len(packs) // (per_gpu_batch_size * dp_size))
    for index in range(dp_rank, count, dp_size):
        yield list(packs[index::count]) or [[]]
