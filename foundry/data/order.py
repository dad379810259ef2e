"""Global order of the training samples: a permutation for each epoch, computed from fingerprint and seed."""

import hashlib
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_TABLE_SAMPLES = 2**24
"""Largest number of samples whose permutation is a table (at most 128 MB); above, it is computed by position."""

_ROUNDS = 8
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class GlobalOrder:
    """Maps each position of a run to a dataset index.

    Position p belongs to epoch p // num_samples. Each epoch is a permutation of the whole dataset that depends only on
    the dataset's fingerprint, the seed and the epoch, not on ranks, workers or microbatches.

    Attributes:
        num_samples: number of samples in the dataset.
        is_keyed: compute permutations with `keyed_permutation` instead of a table.
    """

    def __init__(self, *, num_samples: int, fingerprint: str, seed: int) -> None:
        self.num_samples = num_samples
        self.is_keyed = num_samples > MAX_TABLE_SAMPLES
        self._key = f"{fingerprint}:{seed}"
        self._permutations: dict[int, NDArray[np.int64]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the tables; a worker process computes the tables that it needs."""
        return {**vars(self), "_permutations": {}}

    def indices(self, positions: range) -> NDArray[np.int64]:
        """Return the dataset indices at consecutive positions, (len(positions),) int64."""
        parts, start = [], positions.start
        while start < positions.stop:
            epoch, first = divmod(start, self.num_samples)
            last = min(first + positions.stop - start, self.num_samples)
            if self.is_keyed:
                key = self._digest(epoch, 8 * _ROUNDS)
                parts.append(keyed_permutation(np.arange(first, last), num_items=self.num_samples, key=key))
            else:
                parts.append(self._permutation(epoch)[first:last])
            start += last - first
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._permutations:
            generator = np.random.Generator(np.random.Philox(key=int.from_bytes(self._digest(epoch, 16), "little")))
            # Keep only the tables of this and the preceding epoch: a window rarely covers more than two epochs.
            self._permutations = {e: p for e, p in self._permutations.items() if e == epoch - 1}
            self._permutations[epoch] = generator.permutation(self.num_samples)
        return self._permutations[epoch]

    def _digest(self, epoch: int, size: int) -> bytes:
        return hashlib.blake2b(f"{self._key}:{epoch}".encode(), digest_size=size).digest()


def keyed_permutation(items: NDArray[np.int64], *, num_items: int, key: bytes) -> NDArray[np.int64]:
    """Apply a pseudorandom permutation of `num_items` items to some of them, without a table of all items.

    The permutation is a generalised Feistel network over a nearly square rectangle of at least `num_items` cells,
    applied again to results that are not items (cycle walking; both in Black and Rogaway, 2002, "Ciphers with arbitrary
    finite domains"). Its round function is the finaliser of SplitMix64 (Steele et al., 2014).

    Args:
        items: (n,) int64 from 0 to num_items - 1.
        num_items: size of the domain, at most 2**62.
        key: 64 bytes.

    Returns:
        (n,) int64, the permuted items.
    """
    width = math.isqrt(num_items - 1) + 1
    sides, keys = np.array([width, -(-num_items // width)], np.uint64), np.frombuffer(key, "<u8")
    permuted = _feistel(items.astype(np.uint64), sides, keys)
    while (is_outside := permuted >= num_items).any():
        permuted[is_outside] = _feistel(permuted[is_outside], sides, keys)
    return permuted.astype(np.int64)


def _feistel(items: NDArray[np.uint64], sides: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Run all rounds of the network; each round adds a function of one coordinate to the other."""
    first, second = np.divmod(items, sides[1])
    for number, key in enumerate(keys):
        mixed = second ^ key
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[0]
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[1]
        side = sides[number % 2]
        first, second = second, (first + (mixed ^ (mixed >> np.uint64(31))) % side) % side
    permuted: NDArray[np.uint64] = first * sides[1] + second
    return permuted
