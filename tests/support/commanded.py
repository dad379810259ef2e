"""`Reach` whose goal has a side, which a policy is told and questions are about."""

import numpy as np

from support.reach import Reach


class Commanded(Reach):
    """The goal is reached by words that name its side."""

    instructions = ("go to the left", "go to the right")

    def reset(self, seed):
        observation = super().reset(seed)
        self.instruction = self.instructions[int(self._now.goal[0] > 0)]
        return observation

    def describe(self, draw: np.random.Generator):
        return [("where is the goal ?", "left" if self._now.goal[0] < 0 else "right")]
