"""A simulator without physics: a point moves to a goal in a square of side 2."""

from types import SimpleNamespace

import numpy as np

from foundry.core.simulator import Step


class Reach:
    """State: point and goal; action: displacement of at most 0.1 along each axis."""

    action_dim, fps, instruction = 2, 10.0, "reach the goal"

    def __init__(self, *, state_dim=4, action_dim=2, image_size=None, max_steps=30):
        assert (state_dim, action_dim) == (4, 2)
        self.state_dim, self.image_size, self.max_steps = state_dim, image_size, max_steps
        self._now = SimpleNamespace()

    def reset(self, seed):
        draw = np.random.default_rng(seed)
        self._now = SimpleNamespace(point=draw.uniform(-1, 1, 2), goal=draw.uniform(-1, 1, 2), steps=0)
        return self._observe()

    def step(self, action):
        self._now.point = self._now.point + np.clip(action, -0.1, 0.1)
        self._now.steps += 1
        reached = bool(np.abs(self._now.point - self._now.goal).max() < 0.05)
        return Step(self._observe(), reached, self._now.steps >= self.max_steps)

    def expert_action(self):
        return np.clip(self._now.goal - self._now.point, -0.1, 0.1)

    def render(self, size):
        picture = np.full((size, size, 3), 255, dtype=np.uint8)
        for position, colour in ((self._now.goal, (0, 160, 0)), (self._now.point, (200, 0, 0))):
            column, row = np.clip((position * (0.5, -0.5) + 0.5) * size, 1, size - 2).astype(int)
            picture[row - 1 : row + 2, column - 1 : column + 2] = colour
        return picture

    def close(self):
        pass

    def _observe(self):
        observation = {"state": np.concatenate([self._now.point, self._now.goal]).astype(np.float32)}
        return observation if self.image_size is None else {**observation, "image": self.render(self.image_size)}
