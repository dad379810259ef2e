"""By what a robot's states and actions are scaled: statistics of each dimension, which travel with the weights."""

import json
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from foundry.data.splits import DataSplits
from foundry.tasks.robots.names import STATISTICS

_CONSTANT = 1e-4
"""A dimension that varies by less is left alone, as in Diffusion Policy's `range_eps` (Chi et al., 2023)."""

_MOST_DEVIATIONS = 8.0
_ROWS_AT_A_TIME = 2**16

Array = NDArray[np.floating[Any]]


@dataclass(frozen=True, eq=False)
class Moments:
    """Of each dimension over all frames, (dims,) float64 each; the deviation is that of the population."""

    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    min: NDArray[np.float64]
    max: NDArray[np.float64]

    @classmethod
    def of(cls, values: Array) -> Self:
        """Of the rows of `values`, (frames, dims), of which there is at least one; summed in float64."""
        lowest, highest = (bound.astype(np.float64) for bound in (values.min(axis=0), values.max(axis=0)))
        starts = range(0, len(values), _ROWS_AT_A_TIME)
        slices = [slice(start, start + _ROWS_AT_A_TIME) for start in starts]
        mean = sum(values[rows].sum(axis=0, dtype=np.float64) for rows in slices) / len(values)
        variance = sum(np.square(values[rows] - mean).sum(axis=0) for rows in slices) / len(values)
        return cls(mean, np.sqrt(variance), lowest, highest)

    def to_lists(self) -> dict[str, list[float]]:
        """By name, as JSON has them."""
        return {name: value.tolist() for name, value in vars(self).items()}

    @classmethod
    def from_lists(cls, lists: Any) -> Self:
        """What `to_lists` has given.

        Raises:
            ValueError: it cannot have.
        """
        names = ("mean", "std", "min", "max")
        if not isinstance(lists, dict) or set(lists) != set(names):
            raise ValueError(f"has not {', '.join(names)}")
        if not all(isinstance(lists[name], list) and lists[name] for name in names):
            raise ValueError("has no lists of numbers")
        if not all(type(number) in (int, float) for name in names for number in lists[name]):
            raise ValueError("has what is no number")
        mean, std, lowest, highest = (np.array(lists[name], dtype=np.float64) for name in names)
        if not mean.shape == std.shape == lowest.shape == highest.shape:
            raise ValueError("has lists of different lengths")
        if not all(np.isfinite(array).all() for array in (mean, std, lowest, highest)):
            raise ValueError("has numbers that are not finite")
        if (std < 0).any() or (highest < lowest).any():
            raise ValueError("has a negative deviation, or a maximum below its minimum")
        return cls(mean, std, lowest, highest)


@dataclass(frozen=True, eq=False)
class Statistics:
    """Of the training episodes' frames; what a policy is shown, and what it answers, is in the units they make.

    A dimension that does not vary is only centred: it is 0 afterwards, and an answer near 0 is its one value.
    """

    overrides: ClassVar[tuple[str, ...]] = ("hparams=policy", "simulator=none", "evaluation=default")

    state: Moments
    actions: Moments

    @classmethod
    def of(cls, state: Array, actions: Array) -> Self:
        """Of frames: (frames, state_dim) and (frames, action_dim), at least one."""
        return cls(Moments.of(state), Moments.of(actions))

    def normalise_state(self, state: Array) -> NDArray[np.float32]:
        """States, (..., state_dim), as deviations from the mean, at most 8; float32."""
        scale = np.where(self.state.std < _CONSTANT, 1.0, self.state.std)
        deviations = (state - self.state.mean) / scale
        return np.clip(deviations, -_MOST_DEVIATIONS, _MOST_DEVIATIONS).astype(np.float32)

    def normalise_actions(self, actions: Array) -> NDArray[np.float32]:
        """Actions, (..., action_dim), from [min, max] to [-1, 1], and beyond where they are; float32."""
        return ((actions - self._middle) / self._reach).astype(np.float32)

    def restore_actions(self, actions: Array) -> NDArray[np.float32]:
        """What `normalise_actions` was given, from what it has made of it; float32."""
        return (actions * self._reach + self._middle).astype(np.float32)

    def applied_to(self, data: DataSplits) -> DataSplits:
        """Other episodes in the units of the run that these are of.

        Raises:
            ConfigError: they are none, or their states or actions have other dimensions.
        """
        from foundry.tasks.robots.data.episodes import normalised_by

        return normalised_by(data, self)

    @property
    def _middle(self) -> NDArray[np.float64]:
        return (self.actions.max + self.actions.min) / 2

    @property
    def _reach(self) -> NDArray[np.float64]:
        half = (self.actions.max - self.actions.min) / 2
        return np.where(half < _CONSTANT, 1.0, half)

    def to_json(self) -> str:
        """As a text that `from_json` reads back bit for bit."""
        return json.dumps({"state": self.state.to_lists(), "actions": self.actions.to_lists()}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` has given.

        Raises:
            ValueError: it cannot have; the text says why.
        """
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError("is no JSON") from None
        if not isinstance(content, dict):
            raise ValueError("holds no JSON object")
        found = {}
        for name in ("state", "actions"):
            try:
                found[name] = Moments.from_lists(content.get(name))
            except (ValueError, OverflowError) as error:
                raise ValueError(f"has a {name} that {error}") from None
        return cls(**found)


def statistics_of(data: DataSplits) -> Statistics | None:
    """The statistics that data has kept; None: it has no episodes."""
    kept: Any = data.kept.get(STATISTICS)
    statistics: Statistics | None = kept
    return statistics
