"""Windows over a robot's episodes: recent observations and the next actions of each frame."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foundry.core.errors import ConfigError, Violation
from foundry.data.dataset import BatchDataset
from foundry.data.io.mapped_files import MapsFiles
from foundry.data.splits import DataSplits
from foundry.tasks.robots.data.instructions import encode_instructions, read_tokenizer
from foundry.tasks.robots.data.statistics import Statistics, statistics_of
from foundry.tasks.robots.names import STATISTICS
from foundry.tasks.robots.schemas.data import Episodes


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """Concatenated episodes in the robot's own units.

    Attributes:
        state: (frames, state_dim) float32.
        actions: (frames, action_dim) float32; the action of a frame was chosen from its state.
        lengths: number of frames of each episode, (episodes,) int64, at least 1.
        images: (frames, 3, image_size, image_size) uint8, or None.
        tasks: distinct instructions.
        task_index: index into `tasks` for each frame, (frames,) int64; None if the instructions were not read.
        source: identity of the images, such as a digest of the files they were read from.
    """

    state: NDArray[np.float32]
    actions: NDArray[np.float32]
    lengths: NDArray[np.int64]
    images: NDArray[np.uint8] | None = None
    tasks: Sequence[str] = ()
    task_index: NDArray[np.int64] | None = None
    source: str = ""

    @property
    def starts(self) -> NDArray[np.int64]:
        """First frame of each episode, (episodes,)."""
        return np.cumsum(self.lengths) - self.lengths


class Windows(MapsFiles, BatchDataset):
    """Dataset of some episodes of a recording, with one sample per frame.

    A sample contains the states of the frame and the frames before it, and the actions of the frame and the frames
    after it. The first frame of an episode is repeated before the episode's start. The last action is repeated after
    the episode's end, where `is_padded` is true.
    """

    def __init__(
        self,
        recording: Recording,
        episodes: NDArray[np.int64],
        statistics: Statistics,
        *,
        num_observations: int,
        horizon: int,
        instructions: NDArray[np.int64] | None = None,
    ) -> None:
        """Select episodes of a recording.

        Args:
            recording: the recording of all episodes.
            episodes: numbers of the selected episodes, (n,) int64.
            statistics: statistics for normalizing states and actions.
            num_observations: states per sample.
            horizon: actions per sample.
            instructions: tokens of the recording's tasks, (tasks, instruction_tokens) int64; None for samples without
                instructions.
        """
        self.statistics = statistics
        self._instructions, self._task_index = instructions, recording.task_index
        self._state, self._actions, self._images = recording.state, recording.actions, recording.images
        self._first = recording.starts[episodes]
        self._last = self._first + recording.lengths[episodes] - 1
        self._ends = np.cumsum(recording.lengths[episodes])
        self._past_offsets, self._future_offsets = np.arange(1 - num_observations, 1), np.arange(horizon)

    def __len__(self) -> int:
        """Return the number of frames of all selected episodes."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return the samples of several frames.

        Returns:
            `state` (batch, num_observations, state_dim) float32, normalized; `actions` (batch, horizon, action_dim)
            float32, normalized; `is_padded` (batch, horizon) bool. If the recording has them, also `images` (batch,
            num_observations, 3, image_size, image_size) uint8, and `instruction` (batch, instruction_tokens) int64 of
            the current frame, with -1 after its end.
        """
        positions = np.asarray(indices, dtype=np.int64)
        episode = np.searchsorted(self._ends, positions, side="right")
        first, last = self._first[episode, None], self._last[episode, None]
        frame = (positions - self._ends[episode])[:, None] + last + 1
        past, future = np.maximum(frame + self._past_offsets, first), frame + self._future_offsets
        arrays: dict[str, NDArray[Any]] = {
            "state": self.statistics.normalise_state(self._state[past]),
            "actions": self.statistics.normalise_actions(self._actions[np.minimum(future, last)]),
            "is_padded": future > last,
        }
        if self._images is not None:
            arrays["images"] = np.asarray(self._images[past])
        if self._instructions is not None and self._task_index is not None:
            arrays["instruction"] = self._instructions[self._task_index[frame[:, 0]]]
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def normalised_by(self, statistics: Statistics) -> Self:
        """Return a dataset of the same samples, normalized by other statistics."""
        windows = object.__new__(type(self))
        vars(windows).update(vars(self) | {"statistics": statistics})
        return windows


def episode_splits(recording: Recording, settings: Episodes, *, notes: Mapping[str, Any] | None = None) -> DataSplits:
    """Split a recording into training and held-out episodes, as windows; only training frames enter the statistics.

    Args:
        recording: all episodes.
        settings: lengths of windows, share of held-out episodes, and tokenizer of the instructions.
        notes: facts for plan.json, in addition to the numbers of episodes and frames.

    Raises:
        ConfigError: if there are not enough episodes, states or actions are not finite numbers, or an instruction is
            too long.
    """
    _check_finite(recording)
    is_held_out = held_out_episodes(len(recording.lengths), settings.held_out)
    train, validation = np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
    is_training_frame = np.repeat(~is_held_out, recording.lengths)
    statistics = Statistics.of(recording.state[is_training_frame], recording.actions[is_training_frame])
    windows: dict[str, Any] = {"num_observations": settings.num_observations, "horizon": settings.horizon}
    fingerprint, instructions = _fingerprint(recording, is_held_out, windows), None
    data = DataSplits(train=[], validation=[], fingerprint=fingerprint, kept={STATISTICS: statistics})
    if settings.instruction_tokens is not None and recording.task_index is not None:
        texts = sorted({recording.tasks[index] for index in np.unique(recording.task_index[is_training_frame])})
        data = replace(data, **read_tokenizer(texts, settings.tokenizer, settings.vocab_size)._asdict())
        instructions = encode_instructions(recording.tasks, data, settings.instruction_tokens)
        data = replace(data, fingerprint=_extend_fingerprint(fingerprint, instructions, recording.task_index))
    counts = {
        "train_episodes": len(train),
        "validation_episodes": len(validation),
        "train_frames": int(is_training_frame.sum()),
        "validation_frames": int((~is_training_frame).sum()),
    }
    return replace(
        data,
        train=Windows(recording, train, statistics, **windows, instructions=instructions),
        validation=Windows(recording, validation, statistics, **windows, instructions=instructions),
        notes={**counts, **(notes or {})},
    )


def normalised_by(data: DataSplits, statistics: Statistics) -> DataSplits:
    """Normalize the episodes of a dataset by the statistics of another run.

    Raises:
        ConfigError: if the data has no episodes, or states or actions have other dimensions.
    """
    if (data_statistics := statistics_of(data)) is None:
        raise ConfigError(Violation("data", "has no episodes but the run was trained on episodes; choose data=lerobot"))
    for name, key in (("state", "data.state_dim"), ("actions", "data.action_dim")):
        have, need = (len(getattr(item, name).mean) for item in (data_statistics, statistics))
        if have != need:
            raise ConfigError(Violation(key, f"is {have} but the run was trained with {need}; choose other data"))
    train, validation = data.train, data.validation
    assert isinstance(train, Windows)
    assert isinstance(validation, Windows)
    windows = (train.normalised_by(statistics), validation.normalised_by(statistics))
    return replace(data, train=windows[0], validation=windows[1], kept={STATISTICS: statistics})


def held_out_episodes(count: int, held_out: float) -> NDArray[np.bool_]:
    """Return the mask of held-out episodes: a fraction whose numbers have the smallest hashes, but at least one.

    Args:
        count: number of episodes.
        held_out: fraction to hold out.

    Raises:
        ConfigError: if no episode would remain for training.
    """
    num_held_out = max(1, round(held_out * count))
    if num_held_out >= count:
        has = f"{count} episode{'' if count == 1 else 's'}"
        message = f"is {held_out:g} but the data has {has}, and none would remain for training; add more episodes"
        raise ConfigError(Violation("data.held_out", message))
    hashes = [hashlib.blake2b(b"%d" % number, digest_size=8).hexdigest() for number in range(count)]
    is_held_out = np.zeros(count, dtype=np.bool_)
    is_held_out[np.argsort(hashes, kind="stable")[:num_held_out]] = True
    return is_held_out


def _check_finite(recording: Recording) -> None:
    """Raise if a state or an action is not finite, which would make the statistics NaN."""
    for name, values in (("state", recording.state), ("actions", recording.actions)):
        bad_frames = np.flatnonzero(~np.isfinite(values).all(axis=1))
        if len(bad_frames):
            episode = int(np.searchsorted(np.cumsum(recording.lengths), bad_frames[0], side="right"))
            frame = int(bad_frames[0] - recording.starts[episode])
            message = f"has NaN or infinite values in {name}, first in frame {frame} of episode {episode}"
            raise ConfigError(Violation("data", f"{message}; remove these episodes"))


def _fingerprint(recording: Recording, is_held_out: NDArray[np.bool_], windows: dict[str, Any]) -> str:
    """Return a hash of the recording without its instructions, of the split and of the sizes of the windows."""
    digest = hashlib.blake2b(f"episodes {windows} {recording.source}".encode(), digest_size=16)
    for array in (recording.state, recording.actions, recording.lengths, is_held_out):
        digest.update(f"{array.shape}{array.dtype}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _extend_fingerprint(fingerprint: str, instructions: NDArray[np.int64], task_index: NDArray[np.int64]) -> str:
    """Return a fingerprint that also covers the encoded instructions of all frames."""
    digest = hashlib.blake2b(f"{fingerprint} {instructions.shape}".encode(), digest_size=16)
    for array in (instructions, task_index):
        digest.update(np.ascontiguousarray(array, dtype=np.int64).data)
    return digest.hexdigest()
