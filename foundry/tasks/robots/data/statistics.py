"""Normalization statistics of a robot's states and actions, per dimension, which are saved with the weights."""

import json
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from foundry.data.splits import DataSplits
from foundry.tasks.robots.names import STATISTICS

_CONSTANT = 1e-4
"""Dimensions that vary less than this are not scaled, as with `range_eps` in Diffusion Policy (Chi et al., 2023)."""

_MOST_DEVIATIONS = 8.0
_ROWS_AT_A_TIME = 2**16

Array = NDArray[np.floating[Any]]


@dataclass(frozen=True, eq=False)
class Moments:
    """Moments of each dimension over all frames, (dims,) float64 each; `std` is the population standard deviation."""

    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    min: NDArray[np.float64]
    max: NDArray[np.float64]

    @classmethod
    def of(cls, values: Array) -> Self:
        """Compute the moments of the rows of `values`, (frames, dims), with one frame or more; sums are in float64."""
        lowest, highest = (bound.astype(np.float64) for bound in (values.min(axis=0), values.max(axis=0)))
        starts = range(0, len(values), _ROWS_AT_A_TIME)
        slices = [slice(start, start + _ROWS_AT_A_TIME) for start in starts]
        mean = sum(values[rows].sum(axis=0, dtype=np.float64) for rows in slices) / len(values)
        variance = sum(np.square(values[rows] - mean).sum(axis=0) for rows in slices) / len(values)
        return cls(mean, np.sqrt(variance), lowest, highest)

    def to_lists(self) -> dict[str, list[float]]:
        """Return the moments by name, as JSON values."""
        return {name: value.tolist() for name, value in vars(self).items()}

    @classmethod
    def from_lists(cls, lists: Any) -> Self:
        """Restore moments from the result of `to_lists`.

        Raises:
            ValueError: if `lists` is invalid.
        """
        names = ("mean", "std", "min", "max")
        if not isinstance(lists, dict) or set(lists) != set(names):
            raise ValueError(f"does not have {', '.join(names)}")
        if not all(isinstance(lists[name], list) and lists[name] for name in names):
            raise ValueError("has no lists of numbers")
        if not all(type(number) in (int, float) for name in names for number in lists[name]):
            raise ValueError("has a value that is not a number")
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
    """Statistics of the frames of the training episodes, which define the units of the policy's inputs and outputs.

    A constant dimension is only centered: it becomes 0, and a prediction of 0 is restored to the constant.
    """

    overrides: ClassVar[tuple[str, ...]] = ("hparams=policy", "simulator=none", "evaluation=default")

    state: Moments
    actions: Moments

    @classmethod
    def of(cls, state: Array, actions: Array) -> Self:
        """Compute the statistics of frames: (frames, state_dim) and (frames, action_dim), at least one frame."""
        return cls(Moments.of(state), Moments.of(actions))

    def normalise_state(self, state: Array) -> NDArray[np.float32]:
        """Return states, (..., state_dim), as standardized values in float32, clipped to [-8, 8]."""
        scale = np.where(self.state.std < _CONSTANT, 1.0, self.state.std)
        deviations = (state - self.state.mean) / scale
        return np.clip(deviations, -_MOST_DEVIATIONS, _MOST_DEVIATIONS).astype(np.float32)

    def normalise_actions(self, actions: Array) -> NDArray[np.float32]:
        """Scale actions, (..., action_dim), from [min, max] to [-1, 1], without clipping, in float32."""
        return ((actions - self._middle) / self._reach).astype(np.float32)

    def restore_actions(self, actions: Array) -> NDArray[np.float32]:
        """Invert `normalise_actions`, in float32."""
        return (actions * self._reach + self._middle).astype(np.float32)

    def applied_to(self, data: DataSplits) -> DataSplits:
        """Return other episodes, normalized by these statistics.

        Raises:
            ConfigError: if the data has no episodes, or states or actions have other dimensions.
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
        """Return a JSON text that `from_json` restores exactly."""
        return json.dumps({"state": self.state.to_lists(), "actions": self.actions.to_lists()}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Restore statistics from the result of `to_json`.

        Raises:
            ValueError: if `text` is invalid; the error's text has the reason.
        """
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError("is not JSON") from None
        if not isinstance(content, dict):
            raise ValueError("contains no JSON object")
        moments = {}
        for name in ("state", "actions"):
            try:
                moments[name] = Moments.from_lists(content.get(name))
            except (ValueError, OverflowError) as error:
                raise ValueError(f"has a {name} that {error}") from None
        return cls(**moments)


def statistics_of(data: DataSplits) -> Statistics | None:
    """Return the statistics of a dataset; None if the dataset has no episodes."""
    value: Any = data.kept.get(STATISTICS)
    statistics: Statistics | None = value
    return statistics
