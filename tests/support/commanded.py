"""A variant of `Reach` whose instruction names the side of the goal, also used for question answering."""

import numpy as np

from support.reach import Reach


class Commanded(Reach):
    """`Reach` with an instruction that names the side of the goal."""

    instructions = ("go to the left", "go to the right")

    def reset(self, seed):
        observation = super().reset(seed)
        self.instruction = self.instructions[int(self._now.goal[0] > 0)]
        return observation

    def describe(self, draw: np.random.Generator):
        return [("the goal is where ?", "left" if self._now.goal[0] < 0 else "right")]
