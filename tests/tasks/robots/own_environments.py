"""Environments that a user of Gymnasium might register."""

from typing import ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete


class Line(gymnasium.Env):
    """Move a point to 0; the reward is 1 at 0, and `info` has `success` only if `reports_success`."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 5}
    observation_space, action_space = Box(-1, 1, (1,)), Box(-0.2, 0.2, (1,))

    def __init__(self, *, reports_success=True, render_mode=None):
        self.reports_success, self.render_mode = reports_success, render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-1, 1, 1)
        return self.place.copy(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.place = self.place + action
        is_there = abs(float(self.place[0])) < 0.05
        return self.place.copy(), float(is_there), False, False, {"success": is_there} if self.reports_success else {}

    def render(self):
        picture = np.zeros((30, 60, 3), dtype=np.uint8)
        picture[:, 30:] = 255
        return picture


class Buttons(Line):
    action_space = Discrete(3)


class Mapping(Line):
    observation_space = Dict(left=Box(-1, 1, (1,)), right=Box(-1, 1, (1,)))

    def reset(self, *, seed=None, options=None):
        return {"left": np.zeros(1), "right": np.zeros(1)}, {}


class Broken(Line):
    def __init__(self, **settings):
        raise FileNotFoundError("no arm.xml")


def expert(state):
    return -state


for entry in (Line, Buttons, Mapping, Broken):
    gymnasium.register(f"{entry.__name__}-v0", entry_point=entry)
