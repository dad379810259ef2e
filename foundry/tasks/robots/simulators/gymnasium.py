"""Simulator that wraps a Gymnasium environment."""

from collections.abc import Mapping
from contextlib import nullcontext, redirect_stderr
from importlib import import_module as import_by_name
from io import StringIO
from pkgutil import resolve_name
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foundry.config.configured import configured_by
from foundry.core.errors import ConfigError, Violation, format_reason
from foundry.core.simulator import Observation, Step
from foundry.tasks.robots.schemas.simulator import FETCH, check_fetch
from foundry.tasks.robots.schemas.simulator import Gymnasium as GymnasiumSettings
from foundry.tasks.robots.simulators.packages import choose_egl, need
from foundry.tasks.robots.simulators.pictures import resized

_SUCCESS = ("is_success", "success")


class Gymnasium:
    """A Gymnasium environment with vectors as observations and actions.

    An observation that is a mapping must come from a goal environment such as Fetch; its `observation` and
    `desired_goal`, concatenated, are the state. A step is a success if the reward reaches `success_reward`, or without
    that setting, if `info` has a true `is_success` or `success`. Images are the environment's rendering, resized.

    The `expert` function receives the state, (state_dim,) float64, and returns an action.

    Raises:
        ConfigError: if a package is missing or too new, the environment cannot be created, its observation is another
            mapping, its actions are not vectors, success is not defined, or the expert does not exist.
    """

    @configured_by(GymnasiumSettings)
    def __init__(self, settings: GymnasiumSettings) -> None:
        need("gymnasium", "robot")
        if violations := list(check_fetch(settings.import_module)):
            raise ConfigError(violations)
        self.id, self.instruction = settings.id, settings.instruction or ""
        self.image_size, self.max_steps = settings.image_size, settings.max_steps
        self._success_reward = settings.success_reward
        options = {"max_episode_steps": self.max_steps, **(settings.kwargs or {})}
        self._env = _make(self.id, settings.import_module, options)
        self._low, self._high = _bounds(self._env.action_space, self.id)
        self.action_dim = len(self._low)
        self.fps = float(self._env.metadata.get("render_fps") or 30)
        self._full_state: NDArray[np.float64] = np.zeros(0)
        self._check_step()
        self.state_dim = len(self._full_state)
        if settings.expert is not None:  # without an expert, the simulator is not Demonstrating
            function = _find_expert(settings.expert)
            self.expert_action = lambda: np.asarray(function(self._full_state.copy()), dtype=np.float64)

    def reset(self, seed: int) -> Observation:
        """Begin an episode and pass the seed to the environment."""
        observation, _ = self._env.reset(seed=seed)
        self._steps = 0
        return self._observe(observation)

    def step(self, action: NDArray[np.floating[Any]]) -> Step:
        """Execute an action, clipped to the environment's bounds."""
        clipped = np.clip(action, self._low, self._high).astype(self._env.action_space.dtype)
        observation, reward, terminated, truncated, info = self._env.step(clipped)
        self._steps += 1
        if self._success_reward is None:
            success = any(bool(info.get(name, False)) for name in _SUCCESS)
        else:
            success = bool(reward >= self._success_reward)
        return Step(self._observe(observation), success, terminated or truncated or self._steps >= self.max_steps)

    def render(self, size: int) -> NDArray[np.uint8]:
        """Return the environment's `rgb_array` rendering, resized to (size, size, 3).

        Raises:
            RuntimeError: if the environment does not render.
        """
        try:
            picture = self._env.render()
        except Exception as error:  # any exception of the environment or its rendering library
            raise RuntimeError(f"{self.id} cannot render here ({format_reason(error)})") from error
        if not isinstance(picture, np.ndarray):
            raise RuntimeError(f"{self.id} renders no image with render_mode=rgb_array")
        return resized(picture, size)

    def close(self) -> None:
        """Close the environment and its renderer."""
        self._env.close()

    def _observe(self, observation: Any) -> Observation:
        parts = (
            (observation["observation"], observation["desired_goal"])
            if isinstance(observation, Mapping)
            else (observation,)
        )
        self._full_state = np.concatenate([np.ravel(part) for part in parts]).astype(np.float64)
        result: Observation = {"state": self._full_state.astype(np.float32)}
        return result if self.image_size is None else {**result, "image": self.render(self.image_size)}

    def _check_step(self) -> None:
        """Check early, with one step, that an observation can be converted to a state, and that success is defined."""
        observation, _ = self._env.reset(seed=0)
        if isinstance(observation, Mapping) and not {"observation", "desired_goal"} <= observation.keys():
            message = f"is {self.id}, whose observation has {', '.join(observation)}; wrap it in FlattenObservation"
            raise ConfigError(Violation("simulator.id", message))
        idle = np.clip(0, self._low, self._high).astype(self._env.action_space.dtype)
        *_, info = self._env.step(idle)
        if self._success_reward is None and not any(name in info for name in _SUCCESS):
            message = f"is null but info of {self.id} has neither {' nor '.join(_SUCCESS)}; set the reward of success"
            raise ConfigError(Violation("simulator.success_reward", message))
        self.reset(0)


def _make(name: str, import_module: str | None, settings: Mapping[str, Any]) -> Any:
    choose_egl()
    import gymnasium

    try:
        if import_module is not None:
            with redirect_stderr(StringIO()) if import_module == FETCH else nullcontext():  # its import prints news
                gymnasium.register_envs(import_by_name(import_module))
        return gymnasium.make(name, disable_env_checker=True, **{"render_mode": "rgb_array", **settings})
    except ImportError as error:
        raise ConfigError(
            Violation("simulator.import_module", f"is {import_module}: {format_reason(error)}")
        ) from error
    except Exception as error:  # any exception that the environment raises because of its settings
        raise ConfigError(Violation("simulator.id", f"is {name}, which cannot be created: {error}")) from error


def _bounds(space: Any, name: str) -> tuple[NDArray[Any], NDArray[Any]]:
    import gymnasium

    if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1:
        message = f"is {name}, whose actions are {space}; a policy needs a vector of numbers (a Box of one dimension)"
        raise ConfigError(Violation("simulator.id", message))
    return space.low, space.high


def _find_expert(path: str) -> Any:
    try:
        return resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(Violation("simulator.expert", f"is {path}: {format_reason(error)}")) from error
