"""Mixtures of several data sources: deterministic interleaving of their samples."""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from foundry.config.sources import proportions
from foundry.data.order import GlobalOrder

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Mixture:
    """Sizes and weights of the sources whose samples are concatenated in a dataset.

    Attributes:
        sizes: number of samples of each source.
        weights: sampling weight of each source, above zero, in any unit.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]


class Interleave:
    """Assigns each position to the source with the largest weight / (2 c + 1), for c earlier positions of that source.

    This is the method of Webster and Sainte-Laguë, which apportions seats to parties: after any number of positions,
    the count of each source differs from its exact share by at most (number of sources + 1) / 2. Weights are converted
    from their decimal notation, and all arithmetic uses integers, so no rounding error accumulates in a long run.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        shares = proportions(weights)
        common = math.lcm(*(share.denominator for share in shares))
        self._weights = [int(share * common) for share in shares]
        self._total, multiple = sum(self._weights), math.lcm(*self._weights)
        self._intervals = [multiple // weight for weight in self._weights]

    def counts(self, position: int) -> list[int]:
        """Return the number of positions before `position` that belong to each source.

        The n-th position of a source, from zero, is due at (2 n + 1) / (2 share). The number due by `position` is
        share x position, rounded. The sum of these numbers differs from `position` by at most half the number of
        sources; the numbers are then corrected until it is equal.
        """
        counts = [(2 * weight * position + self._total) // (2 * self._total) for weight in self._weights]
        sources = range(len(counts))
        for _ in range(sum(counts) - position):
            counts[max(sources, key=lambda source: ((2 * counts[source] - 1) * self._intervals[source], source))] -= 1
        for _ in range(position - sum(counts)):
            counts[min(sources, key=lambda source: ((2 * counts[source] + 1) * self._intervals[source], source))] += 1
        return counts

    def sources(self, positions: range) -> Iterator[int]:
        """Yield the source at each position of the range."""
        queue = [
            ((2 * n + 1) * self._intervals[source], source) for source, n in enumerate(self.counts(positions.start))
        ]
        heapq.heapify(queue)
        for _ in positions:
            due_at, source = queue[0]
            heapq.heapreplace(queue, (due_at + 2 * self._intervals[source], source))
            yield source


class MixtureOrder(GlobalOrder):
    """Global order of a mixture: maps each position of a run to a dataset index.

    Each source has a separate `GlobalOrder`, whose epochs are permutations of that source; the n-th position of the
    source reads the n-th sample of that order. The sample at a position depends only on fingerprint, seed, sizes and
    weights.
    """

    def __init__(self, mixture: Mixture, *, fingerprint: str, seed: int) -> None:
        super().__init__(num_samples=sum(mixture.sizes), fingerprint=fingerprint, seed=seed)
        self.is_keyed = True  # no permutation table of the whole mixture
        self._interleave = Interleave(mixture.weights)
        self._first = np.cumsum([0, *mixture.sizes[:-1]])
        self._orders = [
            GlobalOrder(num_samples=size, fingerprint=f"{fingerprint}:{source}", seed=seed)
            for source, size in enumerate(mixture.sizes)
        ]

    def indices(self, positions: range) -> NDArray[np.int64]:
        """Return the dataset indices at consecutive positions, (len(positions),) int64."""
        source_ids = np.fromiter(self._interleave.sources(positions), np.int64, len(positions))
        indices = np.empty(len(positions), np.int64)
        for source, start in enumerate(self._interleave.counts(positions.start)):
            if len(rows := np.flatnonzero(source_ids == source)):
                indices[rows] = self._first[source] + self._orders[source].indices(range(start, start + len(rows)))
        return indices


@dataclass(frozen=True)
class Sources(Generic[_Item]):
    """Concatenation of the items of several sources; `parts` has the items of each source."""

    parts: Sequence[Iterable[_Item]]

    def __iter__(self) -> Iterator[_Item]:
        """Return an iterator over the items of all sources."""
        return chain.from_iterable(self.parts)


def parts_of(items: Iterable[_Item]) -> Sequence[Iterable[_Item]]:
    """Return the parts of `items` if it is a `Sources`, else `items` as the only part."""
    return items.parts if isinstance(items, Sources) else (items,)


@dataclass(frozen=True)
class Interleaved(Generic[_Item]):
    """Items of several sources, evenly interleaved, so that a prefix has items of all sources in proportion."""

    parts: Sequence[Iterable[_Item]]

    def __iter__(self) -> Iterator[_Item]:
        """Yield all items; each source is first iterated once to count its items."""
        counts = [sum(1 for _ in part) for part in self.parts]
        yield from interleaved(self.parts, counts)


def interleaved(parts: Sequence[Iterable[_Item]], counts: Sequence[int]) -> Iterator[_Item]:
    """Yield the items of all parts, evenly interleaved.

    Args:
        parts: items of each source.
        counts: number of items of each source.
    """
    filled = [(iter(part), count) for part, count in zip(parts, counts, strict=True) if count]
    if filled:
        for source in Interleave([count for _, count in filled]).sources(range(sum(counts))):
            yield next(filled[source][0])


def mixture_of(sizes: Sequence[int], weights: Sequence[float] | None) -> Mixture | None:
    """Return the mixture of sources with these numbers of samples, or None if there are no weights."""
    return None if weights is None else Mixture(tuple(sizes), tuple(weights))


def describe_weights(weights: Sequence[float] | None) -> str:
    """Return the weights as a suffix of a fingerprint: equal for equal proportions, empty for None."""
    return "" if weights is None else f"-[{', '.join(map(_describe_share, proportions(weights)))}]"


def _describe_share(share: Fraction) -> str:
    """Return a share exactly, as a decimal if possible (0.7, as in earlier versions), else as a fraction like 2/3."""
    decimals = str(float(share))
    return decimals if Fraction(decimals) == share else str(share)


def describe_sources(
    paths: Sequence[str], sizes: Sequence[int], weights: Sequence[float] | None
) -> list[dict[str, Any]]:
    """Return the entry of each source in plan.json: its path, number of training samples and share of the run."""
    shares = sizes if weights is None else weights
    return [
        {"path": path, "train_samples": size, "share": share / sum(shares)}
        for path, size, share in zip(paths, sizes, shares, strict=True)
    ]
