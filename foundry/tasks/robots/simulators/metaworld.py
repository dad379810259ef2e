"""Simulator of the fifty manipulation tasks of Meta-World, with its experts."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foundry.config.configured import configured_by
from foundry.core.errors import ConfigError, Violation, nearest
from foundry.core.simulator import Observation, Step
from foundry.tasks.robots.schemas.simulator import MetaWorld as MetaWorldSettings
from foundry.tasks.robots.simulators.drawing import Camera
from foundry.tasks.robots.simulators.packages import choose_egl, need

Vector = NDArray[np.float64]


class MetaWorld:
    """A Sawyer arm with one of Meta-World's tasks; start and goal are sampled for each episode.

    The state is Meta-World's observation with its goal (39): hand, fingers and objects at the current and the previous
    step, and the goal position. An action is the hand's motion (3) and the fingers' motion (1), each in [-1, 1].

    Raises:
        ConfigError: if a package is not installed, or the task does not exist.
    """

    state_dim, action_dim = 39, 4

    @configured_by(MetaWorldSettings)
    def __init__(self, settings: MetaWorldSettings) -> None:
        for package in ("metaworld", "packaging"):  # metaworld imports packaging without declaring it
            need(package, "metaworld")
        choose_egl()
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE as ENVIRONMENTS
        from metaworld.policies import ENV_POLICY_MAP as EXPERTS

        task = settings.task
        if task not in EXPERTS:
            message = f"is {task}, which is not a task of Meta-World{nearest(task, EXPERTS)}"
            raise ConfigError(Violation("simulator.task", message))
        self.task, self.image_size, self.max_steps = task, settings.image_size, settings.max_steps
        self.instruction = task.rpartition("-")[0].replace("-", " ")
        self._make_expert = EXPERTS[task]
        self._env = ENVIRONMENTS[f"{task}-goal-observable"](seed=0)
        self._env._freeze_rand_vec, self._env.seeded_rand_vec = False, True  # np_random determines start and goal
        self.fps = 1 / float(self._env.dt)
        self._camera = Camera(self._env.model, "corner2")
        self._state: Vector = np.zeros(self.state_dim)

    def reset(self, seed: int) -> Observation:
        """Begin an episode; `seed` determines the positions of objects and goal."""
        import gymnasium
        import mujoco

        mujoco.mj_resetData(self._env.model, self._env.data)
        self._env.np_random, _ = gymnasium.utils.seeding.np_random(seed)
        self._state, _ = self._env.reset()
        self._expert, self._steps = self._make_expert(), 0
        return self._observe()

    def step(self, action: NDArray[np.floating[Any]]) -> Step:
        """Execute an action, clipped to [-1, 1]."""
        self._state, *_, info = self._env.step(np.clip(action, -1, 1).astype(np.float32))
        self._steps += 1
        return Step(self._observe(), bool(info["success"]), self._steps >= self.max_steps)

    def expert_action(self) -> Vector:
        """Return the action of Meta-World's own policy for the task, clipped to [-1, 1]."""
        return np.clip(np.asarray(self._expert.get_action(self._state), dtype=np.float64), -1, 1)

    def render(self, size: int) -> NDArray[np.uint8]:
        """Render the table from a corner, (size, size, 3).

        Raises:
            RuntimeError: if rendering is not available.
        """
        return self._camera.render(self._env.data, size)[::-1, ::-1].copy()  # this camera is mounted upside down

    def close(self) -> None:
        """Free the renderers."""
        self._camera.close()
        self._env.close()

    def _observe(self) -> Observation:
        observation: Observation = {"state": self._state.astype(np.float32)}
        return observation if self.image_size is None else {**observation, "image": self.render(self.image_size)}
