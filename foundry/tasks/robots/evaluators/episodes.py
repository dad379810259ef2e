"""Batched episodes of a policy in simulators.

The start of an episode depends only on its number, and the random numbers of its n-th prediction on the run's seed, the
number and n. Each rank runs some of the chunks of episodes, whose content and padding do not depend on the number of
ranks. Simulator seeds below 2**32 are for evaluation; demonstrations start at 2**32 and scenes at 2**32 + 2**31.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from foundry.core.errors import ConfigError, Violation, as_text
from foundry.core.protocols import Microbatch
from foundry.core.simulator import Instructing, Observation, Simulator
from foundry.data.splits import DataSplits
from foundry.tasks.robots.data.instructions import encode_instructions
from foundry.tasks.robots.data.statistics import statistics_of
from foundry.tasks.robots.protocols import ActingObjective

log = logging.getLogger(__name__)

_MOST_REPLANS = 2**31
"""Factor in the random keys: the n-th prediction of episode k has the key k times this factor, plus n.

The keys fit into int64, because k is below `MOST_EPISODES`.
"""
_FRAMES = 24
"""Maximum number of frames of a film; the film of a long episode has at least half as many."""


@dataclass(frozen=True)
class Episode:
    """Result of an episode.

    Attributes:
        number: number of the episode, which is also the seed of its start.
        success: whether the task was completed at any step, which ends the episode.
        length: number of executed actions.
        instruction: instruction of the episode.
        other_instruction: other instruction that the policy received; None for the episode's own or no instruction.
    """

    number: int
    success: bool
    length: int
    instruction: str
    other_instruction: str | None = None

    def to_record(self) -> dict[str, Any]:
        """Return the JSON record of the episode."""
        result = {"success": self.success, "length": self.length, "instruction": self.instruction}
        extra = {} if self.other_instruction is None else {"told": self.other_instruction}
        return {"episode": self.number, "seed": self.number, **result, **extra}


@dataclass
class Film:
    """Frames of an episode: one per action of a short episode, and one per 2, 4, ... actions of a longer one.

    Attributes:
        fps: actions per second.
        success: whether the task was completed.
        every: actions between two frames, a power of 2; the last frame may follow sooner.
        frames: frames, (size, size, 3) uint8 each, by the number of actions before them; with the start and the end.
    """

    fps: float
    success: bool = False
    every: int = 1
    frames: dict[int, NDArray[np.uint8]] = field(default_factory=dict)

    def add(self, length: int, frame: NDArray[np.uint8]) -> None:
        """Add the image after `length` actions; if there are too many frames, every second one is dropped."""
        self.frames[length] = frame
        if len(self.frames) > _FRAMES:
            self.every *= 2
            self.frames = {n: image for n, image in self.frames.items() if n % self.every == 0 or n == length}


class Rollouts:
    """Runner of a policy's episodes, in batches that always have `at_a_time` rows.

    Rows of finished episodes, and rows without an episode, stay in the batch as padding. Therefore the actions of an
    episode depend only on the chunk that it is in.

    Args:
        objective: an `ActingObjective`.
        data: the data, whose `statistics` normalize the policy's states and actions.
        simulator: creates a simulator; each episode of a chunk has its own, which later chunks use again.
        num_observations: number of observations that the policy receives; the first one is repeated if there are fewer.
        at_a_time: episodes per chunk.
        instruction_tokens: maximum number of tokens of an instruction, encoded as in the data; None for a policy
            without instructions.
        uses_other_instruction: give the policy another instruction than the episode's, chosen by the episode's number;
            success is still measured for the episode's own.

    Raises:
        ConfigError: if the objective is no `ActingObjective`, there is no simulator, or the data has no statistics; and
            in `run`, if `uses_other_instruction` is set but the simulator has only one instruction.
    """

    def __init__(
        self,
        *,
        objective: object,
        data: DataSplits,
        simulator: Callable[[], Simulator] | None,
        num_observations: int,
        at_a_time: int,
        instruction_tokens: int | None = None,
        uses_other_instruction: bool = False,
    ) -> None:
        key = "evaluation.evaluators.success"
        if not isinstance(objective, ActingObjective):
            message = f"measures a policy, which objective {type(objective).__name__} lacks"
            message += "; choose objective=diffusion_policy"
            raise ConfigError(Violation(key, message))
        if simulator is None:
            raise ConfigError(Violation(key, "needs a simulator; choose one, such as simulator=around"))
        if (statistics := statistics_of(data)) is None:
            message = "needs statistics of states and actions, which this data lacks; choose data=demonstrations"
            raise ConfigError(Violation(key, message))
        self._objective, self._statistics = objective, statistics
        self._build, self._num_observations, self.at_a_time = simulator, num_observations, at_a_time
        self._data = None if instruction_tokens is None else data
        self._instruction_tokens, self._uses_other_instruction = instruction_tokens or 0, uses_other_instruction
        self._rows = list[_Row]()
        self._can_render = True

    def chunks(self, numbers: range) -> list[range]:
        """Split the episodes into chunks; the last chunk may be smaller."""
        return [numbers[start : start + self.at_a_time] for start in range(0, len(numbers), self.at_a_time)]

    def run(
        self,
        model: nn.Module,
        numbers: Sequence[int],
        *,
        device: torch.device,
        autocast: Callable[[], AbstractContextManager[Any]],
        heartbeat: Callable[[str], None],
        num_films: int = 0,
        size: int = 96,
    ) -> tuple[list[Episode], list[Film]]:
        """Run one chunk of episodes to their ends.

        Args:
            model: the model with unsharded weights, in evaluation mode.
            numbers: numbers of the episodes, at most `at_a_time`.
            device: device of the model.
            autocast: context manager for forward passes.
            heartbeat: heartbeat, called with the name of the current activity.
            num_films: number of episodes, from the first, to record as films; none are recorded if the simulator cannot
                render.
            size: height and width of a frame in pixels.

        Returns:
            The results of the episodes, and the recorded films.
        """
        while len(self._rows) < len(numbers):
            heartbeat("building simulators")
            self._rows.append(_Row(self._build(), self._num_observations))
        rows = self._rows[: len(numbers)]
        for number, row in zip(numbers, rows, strict=True):
            row.begin(number, uses_other_instruction=self._uses_other_instruction)
        tokens = self._encode(
            [row.simulator.instruction if row.other_instruction is None else row.other_instruction for row in rows]
        )
        films = self._films(rows[:num_films], size)
        for replan in range(_MOST_REPLANS):
            heartbeat("acting in episodes")
            if all(row.is_over for row in rows):
                break
            observation = {name: value.to(device) for name, value in (self._observe(rows) | tokens).items()}
            keys = torch.full((self.at_a_time,), -1, dtype=torch.int64)
            keys[: len(rows)] = torch.tensor([number * _MOST_REPLANS + replan for number in numbers])
            with autocast():
                chunk = self._objective.act(model, observation, keys)
            normalised = chunk[: len(rows), : self._objective.action_steps].float().cpu().numpy()
            for row, actions in zip(rows, self._statistics.restore_actions(normalised), strict=True):
                row.execute(actions)
        for row, film in zip(rows, films, strict=False):
            film.success = row.success
        return [row.result() for row in rows], films

    def close(self) -> None:
        """Close the simulators; the next chunk creates new ones."""
        while self._rows:
            self._rows.pop().simulator.close()

    def _films(self, rows: "Sequence[_Row]", size: int) -> list[Film]:
        """Start a film of each row's episode and return the films; empty if they cannot be rendered."""
        if not self._can_render:
            return []
        try:
            for row in rows:
                row.start_film(size)
        except RuntimeError as error:
            log.warning("episodes are not filmed: %s (success is still measured)", error)
            self._can_render = False
            for row in rows:
                row.film = None
        return [row.film for row in rows if row.film is not None]

    def _observe(self, rows: "Sequence[_Row]") -> Microbatch:
        """Return the policy's observation for every row, with zeros for unused rows."""
        states = np.stack([row.recent("state") for row in rows]).astype(np.float32)
        observation = {"state": np.asarray(self._statistics.normalise_state(states), dtype=np.float32)}
        if "image" in rows[0].observations[0]:
            observation["images"] = np.stack([row.recent("image") for row in rows]).transpose(0, 1, 4, 2, 3)
        return {name: self._pad(torch.from_numpy(np.ascontiguousarray(value))) for name, value in observation.items()}

    def _encode(self, texts: Sequence[str]) -> Microbatch:
        """Return `instruction`, the encoded texts of all rows; empty for a policy without instructions.

        Raises:
            ConfigError: if an instruction is too long.
        """
        if self._data is None:
            return {}
        tokens = encode_instructions(texts, self._data, self._instruction_tokens)
        return {"instruction": self._pad(torch.from_numpy(tokens))}

    def _pad(self, rows: Tensor) -> Tensor:
        padded = rows.new_zeros((self.at_a_time, *rows.shape[1:]))
        padded[: len(rows)] = rows
        return padded


class _Row:
    """A simulator with its current episode."""

    def __init__(self, simulator: Simulator, num_observations: int) -> None:
        self.simulator = simulator
        self.observations: deque[Mapping[str, NDArray[Any]]] = deque(maxlen=num_observations)
        self.number, self.length, self.success, self.is_over = -1, 0, False, True
        self.film: Film | None = None
        self.other_instruction: str | None = None
        self._size = 0

    def begin(self, number: int, *, uses_other_instruction: bool = False) -> None:
        """Start an episode, without a film.

        Raises:
            ConfigError: if `uses_other_instruction` is set but the simulator has only one instruction.
        """
        self.number, self.length, self.success, self.is_over, self.film = number, 0, False, False, None
        observation = _copy(self.simulator.reset(number))
        self.observations.extend([observation] * (self.observations.maxlen or 1))
        self.other_instruction = _other_instruction(self.simulator, number) if uses_other_instruction else None

    def start_film(self, size: int) -> None:
        """Record the episode from its current step.

        Raises:
            RuntimeError: if rendering is not available.
        """
        self._size, self.film = size, Film(self.simulator.fps)
        self.film.add(0, self.simulator.render(size))

    def recent(self, name: str) -> NDArray[Any]:
        """Return the entry `name` of the latest observations, (num_observations, ...)."""
        return np.stack([observation[name] for observation in self.observations])

    def execute(self, actions: NDArray[Any]) -> None:
        """Execute actions, (n, action_dim), until the episode ends; a non-finite action also ends it."""
        for action in actions:
            if self.is_over:
                return
            if not np.isfinite(action).all():
                log.warning("episode %d ends: an action is not finite", self.number)
                self.is_over = True
                self._record_frame()
                return
            step = self.simulator.step(action)
            self.length += 1
            self.observations.append(_copy(step.observation))
            self.success = bool(step.success)
            self.is_over = self.success or step.ended or self.length >= self.simulator.max_steps
            self._record_frame()

    def _record_frame(self) -> None:
        """Add the current image to the film, if any, at every so many actions and at the end of the episode."""
        film = self.film
        if film is not None and self.length not in film.frames and (self.is_over or self.length % film.every == 0):
            film.add(self.length, self.simulator.render(self._size))

    def result(self) -> Episode:
        """Return the result of the episode."""
        return Episode(self.number, self.success, self.length, self.simulator.instruction, self.other_instruction)


def _other_instruction(simulator: Simulator, number: int) -> str:
    """Return another instruction of the simulator than this episode's, chosen by the episode's number.

    Raises:
        ConfigError: if the simulator has only one instruction.
    """
    instructions = simulator.instructions if isinstance(simulator, Instructing) else ()
    alternatives = [text for text in instructions if text != simulator.instruction]
    if not alternatives:
        message = (
            f"is other but {type(simulator).__name__} has no instructions besides {as_text(simulator.instruction)}"
        )
        raise ConfigError(Violation("instruction", f"{message}; set it to own"))
    # Simulators use the number alone as their seed; use a different seed here.
    return alternatives[int(np.random.default_rng((number, len(instructions))).integers(len(alternatives)))]


def _copy(observation: Observation) -> Mapping[str, NDArray[Any]]:
    """Return a copy of an observation, whose arrays the simulator may reuse."""
    return {name: np.array(value) for name, value in observation.items()}
