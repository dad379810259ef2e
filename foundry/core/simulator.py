"""What a simulator is asked."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Observation = Mapping[str, NDArray[Any]]
"""What a policy sees: `state`, (state_dim,) float32 in the simulator's own units, and where it sees a picture `image`,
(image_size, image_size, 3) uint8."""


class Step(NamedTuple):
    """What an action has led to.

    Attributes:
        observation: afterwards.
        success: whether the task is done now; an episode counts as a success where any of its steps is.
        ended: whether the episode is over for another reason, such as its length or a mistake.
    """

    observation: Observation
    success: bool
    ended: bool


class Simulator(Protocol):
    """One task in one simulated world; episodes follow each other, each from a seed."""

    state_dim: int
    """Numbers in an observation's `state`."""
    action_dim: int
    """Numbers in an action."""
    fps: float
    """Actions a second of simulated time."""
    max_steps: int
    """Actions after which an episode is over."""
    instruction: str
    """What is to be done in this episode, in words; empty where it is always the same."""

    def reset(self, seed: int) -> Observation:
        """Begin an episode, whose start depends on `seed` alone."""
        ...

    def step(self, action: NDArray[np.floating[Any]]) -> Step:
        """Carry out an action, (action_dim,) in the simulator's own units; it is clipped to what can be done."""
        ...

    def render(self, size: int) -> NDArray[np.uint8]:
        """A picture for people, (size, size, 3).

        Raises:
            RuntimeError: nothing can be drawn here, such as without EGL.
        """
        ...

    def close(self) -> None:
        """Free what it holds, such as a renderer; it may be called twice."""
        ...


@runtime_checkable
class Instructing(Protocol):
    """A simulator whose episodes differ in what is to be done."""

    instructions: Sequence[str]
    """All that `instruction` may be."""


@runtime_checkable
class Demonstrating(Protocol):
    """A simulator with an expert, which may look at what a policy is not shown."""

    def expert_action(self) -> NDArray[np.float64]:
        """What the expert would do now, (action_dim,)."""
        ...


@runtime_checkable
class Describing(Protocol):
    """A simulator that says what is to be seen, for models that learn to look."""

    def describe(self, draw: np.random.Generator) -> list[tuple[str, str]]:
        """Questions about how the episode stands now, with their answers; which, and in what order, is drawn."""
        ...
