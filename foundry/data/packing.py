"""Packing: which samples of a window share a row."""

from collections.abc import Sequence

import numpy as np

Pack = list[int]
"""Samples of one row, in their order there."""


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[Pack]:
    """Put each sample, the longest first, into the first row that has room for it (Johnson, 1973).

    Args:
        lengths: tokens of each sample, at most `capacity`.
        capacity: tokens of a row.

    Returns:
        The rows, which depend on the lengths alone.
    """
    packs, room = list[Pack](), np.empty(len(lengths), dtype=np.int64)
    for sample in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        fitting = np.flatnonzero(room[: len(packs)] >= lengths[sample])
        if len(fitting):
            packs[chosen := int(fitting[0])].append(sample)
        else:
            room[chosen := len(packs)] = capacity
            packs.append([sample])
        room[chosen] -= lengths[sample]
    return packs
