"""Demonstrations by the expert of the run's simulator, generated once and cached in LeRobot's format."""

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

from foundry.config.configured import configured_by
from foundry.core.errors import ConfigError, Violation
from foundry.core.simulator import Demonstrating, Observation, Simulator
from foundry.data.io.cached_folder import cached_folder
from foundry.data.splits import DataSplits
from foundry.tasks.robots.data.episodes import episode_splits
from foundry.tasks.robots.data.lerobot import read_recording
from foundry.tasks.robots.data.lerobot_writing import ACTION_KEY, IMAGE_KEY, STATE_KEY, Episode, write_lerobot
from foundry.tasks.robots.data.simulated import simulator_identity
from foundry.tasks.robots.lerobot_info import read_info
from foundry.tasks.robots.schemas.data import Demonstrations

FIRST_SEED = 2**32
"""Simulator seed of the first demonstration; evaluations use lower seeds."""

_FORMAT = 1
_STEPS_AT_THE_GOAL = 8
"""Number of successful steps in a row that end an episode, so that a policy learns to stay at the goal."""
_SPARE_FAILURES = 20
_CONTENT_SETTINGS = ("episodes", "noise", "noisy_share", "state_dim", "action_dim", "image_size")
"""Settings that determine the files of the demonstrations; other settings only determine how the files are read."""
log = logging.getLogger(__name__)


@configured_by(Demonstrations)
def demonstrations(
    settings: Demonstrations,
    *,
    seed: int,
    simulator: Callable[[], Simulator] | None = None,
    simulator_settings: Mapping[str, Any] | None = None,
) -> DataSplits:
    """Return successful episodes of the simulator's expert as windows.

    In a fraction of the episodes, noise is added to the executed actions, while the expert's actions are recorded. So
    the demonstrations show how to recover from states that the expert would not reach (Laskey et al., DART, 2017).

    Args:
        settings: number and noise of the episodes, and the sizes of the windows.
        seed: unused: runs with any seed have the same demonstrations.
        simulator: creates the run's simulator; None if there is no simulator.
        simulator_settings: settings of the simulator.

    Raises:
        ConfigError: if there is no simulator or expert, the sizes differ from the settings, the expert fails too often,
            or an instruction is too long.
    """
    if simulator is None:
        message = "none is incompatible with data=demonstrations, which needs a simulator with an expert"
        raise ConfigError(Violation("simulator", f"{message}; choose one, or data=lerobot"))
    maker = _Maker(simulator, settings)
    folder = cached_folder(
        settings.cache_dir, maker.name(simulator_settings or {}), maker.fill, contents="demonstrations"
    )
    recording = read_recording(
        read_info(str(folder)),
        state_key=STATE_KEY,
        action_key=ACTION_KEY,
        pictures=None if settings.image_size is None else (IMAGE_KEY, settings.image_size),
        has_tasks=settings.instruction_tokens is not None,
        cache_dir=settings.cache_dir,
    )
    return episode_splits(recording, settings, notes={"demonstrations": str(folder)})


@dataclass(frozen=True)
class _Maker:
    """Generator of demonstrations; see `demonstrations`."""

    simulator: Callable[[], Simulator]
    settings: Demonstrations

    def name(self, simulator_settings: Mapping[str, Any]) -> str:
        """Return the name of the cache folder: a hash of all settings, versions and sources that affect the content."""
        data_settings = {name: getattr(self.settings, name) for name in _CONTENT_SETTINGS}
        identity = {"format": _FORMAT, "demonstrations": data_settings, **simulator_identity(simulator_settings)}
        text = json.dumps(identity, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def fill(self, folder: Path) -> tuple[str, ...]:
        """Generate the demonstrations in a folder, and return the names of the written files."""
        start, frames = time.monotonic(), 0

        def count_frames(episodes: Iterator[Episode]) -> Iterator[Episode]:
            nonlocal frames
            for episode in episodes:
                frames += len(episode.state)
                yield episode

        with closing(self.simulator()) as simulator:
            kind = type(simulator).__name__
            files = write_lerobot(folder, count_frames(self._record(simulator)), fps=simulator.fps, robot_type=kind)
        seconds = time.monotonic() - start
        log.info(
            "generated %d demonstrations of %s, %d frames, in %.1f s", self.settings.episodes, kind, frames, seconds
        )
        return files

    def _record(self, simulator: Simulator) -> Iterator[Episode]:
        """Yield successful episodes in the order of the simulator's seeds; failed episodes are skipped.

        Raises:
            ConfigError: if the simulator has no expert, or over 20 and over two thirds of the episodes failed.
        """
        kind = type(simulator).__name__
        if not isinstance(simulator, Demonstrating):
            message = (
                f"is demonstrations but {kind} has no expert_action(); record demonstrations and choose data=lerobot"
            )
            raise ConfigError(Violation("data", message))
        count = failures = 0
        while count < self.settings.episodes:
            episode = self._run(simulator, count + failures)
            if episode is not None:
                count += 1
                yield episode
                continue
            failures += 1
            if failures > _SPARE_FAILURES and failures > 2 * count:
                message = f"is {self.settings.noise:g} but the expert of {kind} has failed in {failures} of "
                message += f"{count + failures} episodes; lower it, or record demonstrations and choose data=lerobot"
                raise ConfigError(Violation("data.noise", message))

    def _run(self, simulator: Simulator, number: int) -> Episode | None:
        """Run the expert in an episode and return it; None if its last step is not a success."""
        assert isinstance(simulator, Demonstrating)
        draw = np.random.default_rng((FIRST_SEED + number, _FORMAT))
        noise = self.settings.noise if draw.random() < self.settings.noisy_share else 0.0
        observations, actions = list[Observation](), list[NDArray[np.float64]]()
        observation, at_goal, ended = simulator.reset(FIRST_SEED + number), 0, False
        task = simulator.instruction
        while at_goal < _STEPS_AT_THE_GOAL and not ended:
            action = np.asarray(simulator.expert_action(), dtype=np.float64)
            observations.append(observation)
            actions.append(action)
            observation, success, ended = simulator.step(action + noise * draw.standard_normal(action.shape))
            at_goal = at_goal + 1 if success else 0
        return self._make_episode(simulator, observations, actions, task) if at_goal else None

    def _make_episode(
        self, simulator: Simulator, observations: list[Observation], action_list: list[NDArray[np.float64]], task: str
    ) -> Episode:
        """Return the recorded episode, after a check that its sizes match the settings.

        Raises:
            ConfigError: if the sizes differ.
        """
        state = np.stack([np.asarray(observation["state"], dtype=np.float32) for observation in observations])
        actions = np.stack(action_list).astype(np.float32)
        for name, values in (("state_dim", state), ("action_dim", actions)):
            size_setting = getattr(self.settings, name)
            if values.shape[1:] != (size_setting,):
                message = f"is {size_setting} but {type(simulator).__name__} has {values[0].size}; leave it out"
                raise ConfigError(Violation(f"data.{name}", message))
        images, size = None, self.settings.image_size
        if size is not None:
            pictures = [observation.get("image") for observation in observations]
            if any(picture is None or picture.shape != (size, size, 3) for picture in pictures):
                message = f"is {size} but {type(simulator).__name__} returns no image of this size; leave it out"
                raise ConfigError(Violation("data.image_size", message))
            images = np.stack([picture for picture in pictures if picture is not None]).astype(np.uint8, copy=False)
        return Episode(state=state, actions=actions, task=task, images=images)
