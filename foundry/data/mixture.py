"""Several sources in given shares: which of them stands at each position, and which of its samples."""

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
    """Sources whose samples follow one another in a dataset, and the shares in which they are read.

    Attributes:
        sizes: the number of samples of each.
        weights: in proportion to the shares, above zero.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]


class Interleave:
    """Whose turn it is: position p goes to the source with the largest weight / (2 c + 1), c its turns so far.

    That is the method of Webster and Sainte-Laguë, by which seats are given to parties: after any number of positions
    each source has had its share of them to within (number of sources + 1) / 2. Weights are taken as they are written
    in decimals, and all arithmetic is of whole numbers, so that nothing adds up over a run, however long.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        shares = proportions(weights)
        common = math.lcm(*(share.denominator for share in shares))
        self._weights = [int(share * common) for share in shares]
        self._total, multiple = sum(self._weights), math.lcm(*self._weights)
        self._intervals = [multiple // weight for weight in self._weights]

    def counts(self, position: int) -> list[int]:
        """How many of the positions before this one each source has.

        The n-th turn of a source, from zero, falls due at (2 n + 1) / (2 share). Those due by `position` are its share
        rounded; a few, at most half as many as there are sources, are then too many or missing.
        """
        counts = [(2 * weight * position + self._total) // (2 * self._total) for weight in self._weights]
        sources = range(len(counts))
        for _ in range(sum(counts) - position):
            counts[max(sources, key=lambda source: ((2 * counts[source] - 1) * self._intervals[source], source))] -= 1
        for _ in range(position - sum(counts)):
            counts[min(sources, key=lambda source: ((2 * counts[source] + 1) * self._intervals[source], source))] += 1
        return counts

    def sources(self, positions: range) -> Iterator[int]:
        """The source at each of consecutive positions."""
        due = [((2 * n + 1) * self._intervals[source], source) for source, n in enumerate(self.counts(positions.start))]
        heapq.heapify(due)
        for _ in positions:
            when, source = due[0]
            heapq.heapreplace(due, (when + 2 * self._intervals[source], source))
            yield source


class MixtureOrder(GlobalOrder):
    """Which sample of the dataset stands at each position of a run over a mixture.

    The n-th turn of a source is the n-th sample of an order of its own, in which each epoch is a permutation of all of
    it. So what stands at a position depends on fingerprint, seed, sizes and weights only.
    """

    def __init__(self, mixture: Mixture, *, fingerprint: str, seed: int) -> None:
        super().__init__(num_samples=sum(mixture.sizes), fingerprint=fingerprint, seed=seed)
        self.is_keyed = True  # there is no table of the whole
        self._interleave = Interleave(mixture.weights)
        self._first = np.cumsum([0, *mixture.sizes[:-1]])
        self._own = [
            GlobalOrder(num_samples=size, fingerprint=f"{fingerprint}:{source}", seed=seed)
            for source, size in enumerate(mixture.sizes)
        ]

    def indices(self, positions: range) -> NDArray[np.int64]:
        """Indices into the dataset, (len(positions),) int64, of consecutive positions."""
        of_source = np.fromiter(self._interleave.sources(positions), np.int64, len(positions))
        found = np.empty(len(positions), np.int64)
        for source, start in enumerate(self._interleave.counts(positions.start)):
            if len(here := np.flatnonzero(of_source == source)):
                found[here] = self._first[source] + self._own[source].indices(range(start, start + len(here)))
        return found


@dataclass(frozen=True)
class Sources(Generic[_Item]):
    """What several sources have, one after the other."""

    parts: Sequence[Iterable[_Item]]

    def __iter__(self) -> Iterator[_Item]:
        """All of it."""
        return chain.from_iterable(self.parts)


def parts_of(items: Iterable[_Item]) -> Sequence[Iterable[_Item]]:
    """What each source has, where there are several."""
    return items.parts if isinstance(items, Sources) else (items,)


@dataclass(frozen=True)
class Interleaved(Generic[_Item]):
    """What several sources have, each at even distances from beginning to end, so that the first few are of all."""

    parts: Sequence[Iterable[_Item]]

    def __iter__(self) -> Iterator[_Item]:
        """All of it; each is gone through once to be counted."""
        counts = [sum(1 for _ in part) for part in self.parts]
        yield from interleaved(self.parts, counts)


def interleaved(parts: Sequence[Iterable[_Item]], counts: Sequence[int]) -> Iterator[_Item]:
    """The items of all parts, of which each has `counts` many, at even distances."""
    filled = [(iter(part), count) for part, count in zip(parts, counts, strict=True) if count]
    if filled:
        for source in Interleave([count for _, count in filled]).sources(range(sum(counts))):
            yield next(filled[source][0])


def mixture_of(sizes: Sequence[int], weights: Sequence[float] | None) -> Mixture | None:
    """The mixture of sources of these numbers of samples; without weights they are one dataset."""
    return None if weights is None else Mixture(tuple(sizes), tuple(weights))


def describe_weights(weights: Sequence[float] | None) -> str:
    """Return the end of a fingerprint of data with these weights: the same for the same proportions, empty for None."""
    return "" if weights is None else f"-[{', '.join(map(_describe_share, proportions(weights)))}]"


def _describe_share(share: Fraction) -> str:
    """Return a share exactly: 0.7, since weights whose sum is 1 were once written as they are; otherwise 2/3."""
    decimals = str(float(share))
    return decimals if Fraction(decimals) == share else str(share)


def describe_sources(
    paths: Sequence[str], sizes: Sequence[int], weights: Sequence[float] | None
) -> list[dict[str, Any]]:
    """What plan.json says of each of several sources: its path, its training samples and its share of a run."""
    shares = sizes if weights is None else weights
    return [
        {"path": path, "train_samples": size, "share": share / sum(shares)}
        for path, size, share in zip(paths, sizes, shares, strict=True)
    ]
