"""Episodes of a policy in a simulator, several of them in step with each other."""

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

from foundry.core.errors import ConfigError, Violation, shown
from foundry.core.protocols import Microbatch
from foundry.core.simulator import Instructing, Observation, Simulator
from foundry.data.splits import DataSplits
from foundry.tasks.robots.data.instructions import encode_instructions
from foundry.tasks.robots.data.statistics import statistics_of
from foundry.tasks.robots.protocols import ActingObjective

log = logging.getLogger(__name__)

_MOST_REPLANS = 2**31
"""The key of episode k's n-th replan is k times this and n; k is below `MOST_EPISODES`, so that it fits into int64."""
_FRAMES = 24
"""Of an episode at most; of a long one at least half of it."""


@dataclass(frozen=True)
class Episode:
    """What came of an episode.

    Attributes:
        number: which one, also the seed of its start.
        success: whether the task was done at any step; the episode ends there.
        length: actions carried out.
        instruction: what was to be done, in words.
        told: what the policy was told instead; None: that, or nothing.
    """

    number: int
    success: bool
    length: int
    instruction: str
    told: str | None = None

    def to_record(self) -> dict[str, Any]:
        """By name, as JSON has it."""
        own = {"success": self.success, "length": self.length, "instruction": self.instruction}
        other = {} if self.told is None else {"told": self.told}
        return {"episode": self.number, "seed": self.number, **own, **other}


@dataclass
class Film:
    """What an episode looked like: every action of a short one, of a longer one every second, fourth and so on.

    Attributes:
        fps: actions a second.
        success: whether the task was done.
        every: actions from one frame to the next, a power of 2; the last may come sooner.
        frames: by the number of actions before them, (size, size, 3) uint8 each, the start and the end among them.
    """

    fps: float
    success: bool = False
    every: int = 1
    frames: dict[int, NDArray[np.uint8]] = field(default_factory=dict)

    def add(self, length: int, frame: NDArray[np.uint8]) -> None:
        """Add the picture after `length` actions; where there are too many, every second one goes."""
        self.frames[length] = frame
        if len(self.frames) > _FRAMES:
            self.every *= 2
            self.frames = {n: kept for n, kept in self.frames.items() if n % self.every == 0 or n == length}


class Rollouts:
    """Has a policy act in episodes, `at_a_time` of them in one batch, which has that many rows at any time.

    The rows of episodes that are over, and those for which there is none, stay in the batch as padding. So what a row
    is answered with depends on its chunk of episodes, and not on who asks.

    Args:
        objective: an `ActingObjective`.
        data: its `statistics` give the units of the policy.
        simulator: makes a simulator; each of a chunk's episodes has one of its own. They are kept from one chunk to
            the next.
        num_observations: the policy is shown, the first repeated where there are fewer.
        at_a_time: episodes of a chunk.
        instruction_tokens: of what the policy is told, in the tokens of the data; None: nothing.
        is_told_another: it is told another instruction than the episode's, chosen by the episode's number; success is
            still that of the episode's own.

    Raises:
        ConfigError: the objective has no policy, there is no simulator, or the data has no statistics; the policy is to
            be told another instruction, and there is none.
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
        is_told_another: bool = False,
    ) -> None:
        key = "evaluation.evaluators.success"
        if not isinstance(objective, ActingObjective):
            message = f"measures a policy, but objective {type(objective).__name__} has none"
            message += "; choose objective=diffusion_policy"
            raise ConfigError(Violation(key, message))
        if simulator is None:
            raise ConfigError(Violation(key, "needs a simulator to act in; choose one, such as simulator=around"))
        if (statistics := statistics_of(data)) is None:
            message = "needs statistics of states and actions, which this data lacks; choose data=demonstrations"
            raise ConfigError(Violation(key, message))
        self._objective, self._statistics = objective, statistics
        self._build, self._num_observations, self.at_a_time = simulator, num_observations, at_a_time
        self._data = None if instruction_tokens is None else data
        self._instruction_tokens, self._is_told_another = instruction_tokens or 0, is_told_another
        self._rows = list[_Row]()
        self._can_draw = True

    def chunks(self, numbers: range) -> list[range]:
        """Episodes in chunks; the last may have fewer."""
        return [numbers[start : start + self.at_a_time] for start in range(0, len(numbers), self.at_a_time)]

    def run(
        self,
        model: nn.Module,
        numbers: Sequence[int],
        *,
        device: torch.device,
        autocast: Callable[[], AbstractContextManager[Any]],
        beat: Callable[[str], None],
        drawn: int = 0,
        size: int = 96,
    ) -> tuple[list[Episode], list[Film]]:
        """Run one chunk of episodes to their ends.

        Args:
            model: with all of its weights here, in evaluation mode.
            numbers: of the episodes, at most `at_a_time`.
            device: of the model.
            autocast: a context for forward passes.
            beat: says what is being done, to a watchdog.
            drawn: the first so many are drawn; none where the simulator cannot draw.
            size: of a frame in pixels.

        Returns:
            What came of each, and the films of those that were drawn.
        """
        while len(self._rows) < len(numbers):
            beat("building simulators")
            self._rows.append(_Row(self._build(), self._num_observations))
        rows = self._rows[: len(numbers)]
        for number, row in zip(numbers, rows, strict=True):
            row.begin(number, is_told_another=self._is_told_another)
        told = self._encode([row.simulator.instruction if row.told is None else row.told for row in rows])
        films = self._films(rows[:drawn], size)
        for replan in range(_MOST_REPLANS):
            beat("acting in episodes")
            if all(row.is_over for row in rows):
                break
            observation = {name: value.to(device) for name, value in (self._observe(rows) | told).items()}
            keys = torch.full((self.at_a_time,), -1, dtype=torch.int64)
            keys[: len(rows)] = torch.tensor([number * _MOST_REPLANS + replan for number in numbers])
            with autocast():
                chunk = self._objective.act(model, observation, keys)
            planned = chunk[: len(rows), : self._objective.action_steps].float().cpu().numpy()
            for row, actions in zip(rows, self._statistics.restore_actions(planned), strict=True):
                row.carry_out(actions)
        for row, film in zip(rows, films, strict=False):
            film.success = row.success
        return [row.result() for row in rows], films

    def close(self) -> None:
        """Close the simulators; the next chunk makes new ones."""
        while self._rows:
            self._rows.pop().simulator.close()

    def _films(self, rows: "Sequence[_Row]", size: int) -> list[Film]:
        """The films of episodes that have just begun; none where they cannot be drawn."""
        if not self._can_draw:
            return []
        try:
            for row in rows:
                row.start_film(size)
        except RuntimeError as error:
            log.warning("episodes are not drawn: %s (success is measured all the same)", error)
            self._can_draw = False
            for row in rows:
                row.film = None
        return [row.film for row in rows if row.film is not None]

    def _observe(self, rows: "Sequence[_Row]") -> Microbatch:
        """What the policy is shown of every row; zeros in those without an episode."""
        states = np.stack([row.recent("state") for row in rows]).astype(np.float32)
        seen = {"state": np.asarray(self._statistics.normalise_state(states), dtype=np.float32)}
        if "image" in rows[0].seen[0]:
            seen["images"] = np.stack([row.recent("image") for row in rows]).transpose(0, 1, 4, 2, 3)
        return {name: self._padded(torch.from_numpy(np.ascontiguousarray(value))) for name, value in seen.items()}

    def _encode(self, texts: Sequence[str]) -> Microbatch:
        """What the policy is told in every row, where it is told anything.

        Raises:
            ConfigError: an instruction is too long.
        """
        if self._data is None:
            return {}
        tokens = encode_instructions(texts, self._data, self._instruction_tokens)
        return {"instruction": self._padded(torch.from_numpy(tokens))}

    def _padded(self, rows: Tensor) -> Tensor:
        padded = rows.new_zeros((self.at_a_time, *rows.shape[1:]))
        padded[: len(rows)] = rows
        return padded


class _Row:
    """A simulator and the episode that takes place in it."""

    def __init__(self, simulator: Simulator, num_observations: int) -> None:
        self.simulator = simulator
        self.seen: deque[Mapping[str, NDArray[Any]]] = deque(maxlen=num_observations)
        self.number, self.length, self.success, self.is_over = -1, 0, False, True
        self.film: Film | None = None
        self.told: str | None = None
        self._size = 0

    def begin(self, number: int, *, is_told_another: bool = False) -> None:
        """Start an episode; it is not drawn.

        Raises:
            ConfigError: another instruction is to be told, and the simulator has none.
        """
        self.number, self.length, self.success, self.is_over, self.film = number, 0, False, False, None
        first = _copied(self.simulator.reset(number))
        self.seen.extend([first] * (self.seen.maxlen or 1))
        self.told = _other_instruction(self.simulator, number) if is_told_another else None

    def start_film(self, size: int) -> None:
        """Draw the episode from here on.

        Raises:
            RuntimeError: nothing can be drawn here.
        """
        self._size, self.film = size, Film(self.simulator.fps)
        self.film.add(0, self.simulator.render(size))

    def recent(self, name: str) -> NDArray[Any]:
        """An entry of the last observations, (num_observations, ...)."""
        return np.stack([observation[name] for observation in self.seen])

    def carry_out(self, actions: NDArray[Any]) -> None:
        """Carry out actions, (n, action_dim), until the episode is over; a number that is none ends it, too."""
        for action in actions:
            if self.is_over:
                return
            if not np.isfinite(action).all():
                log.warning("episode %d ends: an action is not finite", self.number)
                self.is_over = True
                return
            step = self.simulator.step(action)
            self.length += 1
            self.seen.append(_copied(step.observation))
            self.success = bool(step.success)
            self.is_over = self.success or step.ended or self.length >= self.simulator.max_steps
            if self.film is not None and (self.is_over or self.length % self.film.every == 0):
                self.film.add(self.length, self.simulator.render(self._size))

    def result(self) -> Episode:
        """What came of the episode."""
        return Episode(self.number, self.success, self.length, self.simulator.instruction, self.told)


def _other_instruction(simulator: Simulator, number: int) -> str:
    """One of the simulator's instructions that is not this episode's, by the episode's number.

    Raises:
        ConfigError: there is none.
    """
    every = simulator.instructions if isinstance(simulator, Instructing) else ()
    others = [text for text in every if text != simulator.instruction]
    if not others:
        message = f"is other but {type(simulator).__name__} has no instructions besides {shown(simulator.instruction)}"
        raise ConfigError(Violation("instruction", f"{message}; set it to own"))
    # Simulators draw by the number alone.
    return others[int(np.random.default_rng((number, len(every))).integers(len(others)))]


def _copied(observation: Observation) -> Mapping[str, NDArray[Any]]:
    """An observation that stays as it is when the simulator goes on."""
    return {name: np.array(value) for name, value in observation.items()}
