"""Demonstrations by the expert of the run's simulator, made once and kept as a folder in LeRobot's format."""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foundry.core.errors import ConfigError, Violation
from foundry.core.simulator import Demonstrating, Observation, Simulator
from foundry.data.io.cached_folder import cached_folder
from foundry.data.splits import DataSplits
from foundry.tasks.robots.data.episodes import episode_splits
from foundry.tasks.robots.data.lerobot import read_recording
from foundry.tasks.robots.data.lerobot_writing import ACTION_KEY, IMAGE_KEY, STATE_KEY, Episode, write_lerobot
from foundry.tasks.robots.data.simulated import simulator_identity
from foundry.tasks.robots.lerobot_info import read_info

FIRST_SEED = 2**32
"""Of the simulator, for the first demonstration; evaluations use seeds below it."""

_FORMAT = 1
_STEPS_AT_THE_GOAL = 8
"""What is recorded after success, so that a policy learns to stay."""
_SPARE_FAILURES = 20
log = logging.getLogger(__name__)


def demonstrations(
    *,
    seed: int,
    episodes: int,
    noise: float,
    noisy_share: float,
    state_dim: int,
    action_dim: int,
    image_size: int | None,
    num_observations: int,
    horizon: int,
    held_out: float,
    cache_dir: str,
    instruction_tokens: int | None = None,
    tokenizer: str | None = None,
    vocab_size: int = 4096,
    num_workers: int = 0,
    simulator: Callable[[], Simulator] | None = None,
    simulator_settings: Mapping[str, Any] | None = None,
) -> DataSplits:
    """Successful episodes of the simulator's expert, as windows.

    In a share of the episodes what is executed is the expert's action with noise, while the action itself is recorded:
    so the expert shows how to come back from where it would not have gone (Laskey et al., DART, 2017).

    Args:
        seed: unused: the same demonstrations are made for runs with any seed.
        episodes: successful ones.
        noise: standard deviation of what is added to an action, in the simulator's own units.
        noisy_share: share of the episodes with noise.
        state_dim: numbers in a state: the simulator's.
        action_dim: numbers in an action: the simulator's.
        image_size: height and width in pixels of the picture that the simulator shows; None: it shows none.
        num_observations: states of a sample.
        horizon: actions of a sample.
        held_out: share of episodes kept for validation.
        cache_dir: folder for the demonstrations.
        instruction_tokens: the most tokens of an instruction; None: samples have no words.
        tokenizer: of instructions, as for `episode_splits`.
        vocab_size: likewise.
        num_workers: unused here: how the run's loader reads.
        simulator: makes the run's simulator; None: it has none.
        simulator_settings: what it is made of.

    Raises:
        ConfigError: there is no simulator, it has no expert, shows something else than its settings say, its expert
            fails too often, or an instruction is too long.
    """
    if simulator is None:
        message = "is none but data=demonstrations is made by the simulator's expert; choose one, or data=lerobot"
        raise ConfigError(Violation("simulator", message))
    made = _Making(simulator, episodes, noise, noisy_share, state_dim, action_dim, image_size)
    folder = cached_folder(cache_dir, made.name(simulator_settings or {}), made.fill, what="demonstrations")
    recording = read_recording(
        read_info(str(folder)),
        state_key=STATE_KEY,
        action_key=ACTION_KEY,
        pictures=None if image_size is None else (IMAGE_KEY, image_size),
        has_tasks=instruction_tokens is not None,
        cache_dir=cache_dir,
    )
    return episode_splits(
        recording,
        num_observations=num_observations,
        horizon=horizon,
        held_out=held_out,
        instruction_tokens=instruction_tokens,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        notes={"demonstrations": str(folder)},
    )


@dataclass(frozen=True)
class _Making:
    """What is made, and of what; see `demonstrations`."""

    simulator: Callable[[], Simulator]
    episodes: int
    noise: float
    noisy_share: float
    state_dim: int
    action_dim: int
    image_size: int | None

    def name(self, settings: Mapping[str, Any]) -> str:
        """Of the folder in the cache: a hash of settings, versions and sources, on which the demonstrations depend."""
        own = {name: value for name, value in vars(self).items() if name != "simulator"}
        depends = {"format": _FORMAT, "demonstrations": own, **simulator_identity(settings)}
        text = json.dumps(depends, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def fill(self, folder: Path) -> tuple[str, ...]:
        """Make them in a folder; the names of the files."""
        began, frames = time.monotonic(), 0

        def counted(found: Iterator[Episode]) -> Iterator[Episode]:
            nonlocal frames
            for episode in found:
                frames += len(episode.state)
                yield episode

        with closing(self.simulator()) as simulator:
            kind = type(simulator).__name__
            files = write_lerobot(folder, counted(self._record(simulator)), fps=simulator.fps, robot_type=kind)
        seconds = time.monotonic() - began
        log.info("made %d demonstrations of %s, %d frames, in %.1f s", self.episodes, kind, frames, seconds)
        return files

    def _record(self, simulator: Simulator) -> Iterator[Episode]:
        """Successful episodes, by the simulator's seeds in their order; those that fail are left out.

        Raises:
            ConfigError: it has no expert, or one that fails in most of them.
        """
        kind = type(simulator).__name__
        if not isinstance(simulator, Demonstrating):
            message = f"is demonstrations but {kind} has no expert_action(); record some, and choose data=lerobot"
            raise ConfigError(Violation("data", message))
        made = failed = 0
        while made < self.episodes:
            episode = self._run(simulator, made + failed)
            if episode is not None:
                made += 1
                yield episode
                continue
            failed += 1
            if failed > _SPARE_FAILURES and failed > 2 * made:
                message = f"is {self.noise:g}, with which the expert of {kind} has failed in {failed} of "
                message += f"{made + failed} episodes; lower it, or record demonstrations and choose data=lerobot"
                raise ConfigError(Violation("data.noise", message))

    def _run(self, simulator: Simulator, number: int) -> Episode | None:
        """What the expert does in one episode; None where it does not end at the goal."""
        assert isinstance(simulator, Demonstrating)
        draw = np.random.default_rng((FIRST_SEED + number, _FORMAT))
        noise = self.noise if draw.random() < self.noisy_share else 0.0
        seen, done = list[Observation](), list[NDArray[np.float64]]()
        observation, at_goal, ended = simulator.reset(FIRST_SEED + number), 0, False
        task = simulator.instruction
        while at_goal < _STEPS_AT_THE_GOAL and not ended:
            action = np.asarray(simulator.expert_action(), dtype=np.float64)
            seen.append(observation)
            done.append(action)
            observation, success, ended = simulator.step(action + noise * draw.standard_normal(action.shape))
            at_goal = at_goal + 1 if success else 0
        return self._checked(simulator, seen, done, task) if at_goal else None

    def _checked(
        self, simulator: Simulator, seen: list[Observation], done: list[NDArray[np.float64]], task: str
    ) -> Episode:
        """What was recorded, where it is what the settings say.

        Raises:
            ConfigError: it has other dimensions.
        """
        state = np.stack([np.asarray(observation["state"], dtype=np.float32) for observation in seen])
        actions = np.stack(done).astype(np.float32)
        for name, found, stated in (("state_dim", state, self.state_dim), ("action_dim", actions, self.action_dim)):
            if found.shape[1:] != (stated,):
                message = f"is {stated} but {type(simulator).__name__} has {found[0].size}; leave it out"
                raise ConfigError(Violation(f"data.{name}", message))
        images = None
        if self.image_size is not None:
            pictures = [observation.get("image") for observation in seen]
            if any(picture is None or picture.shape != (self.image_size, self.image_size, 3) for picture in pictures):
                message = f"is {self.image_size} but {type(simulator).__name__} shows no such picture; leave it out"
                raise ConfigError(Violation("data.image_size", message))
            images = np.stack([picture for picture in pictures if picture is not None]).astype(np.uint8, copy=False)
        return Episode(state=state, actions=actions, task=task, images=images)
