"""Protocols of simulators."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Observation = Mapping[str, NDArray[Any]]
"""Input of a policy: `state`, (state_dim,) float32 in the simulator's units, and for policies with vision `image`,
(image_size, image_size, 3) uint8.
"""


class Step(NamedTuple):
    """Result of an action.

    Attributes:
        observation: observation after the action.
        success: whether the task is completed now; an episode is a success if `success` is True after any of its steps.
        ended: whether the episode ended for another reason, such as its length or a failure.
    """

    observation: Observation
    success: bool
    ended: bool


class Simulator(Protocol):
    """One task in one simulated world, which runs one episode at a time, each from a seed."""

    state_dim: int
    """Size of an observation's `state`."""
    action_dim: int
    """Size of an action."""
    fps: float
    """Actions per second of simulated time."""
    max_steps: int
    """Maximum number of actions in an episode."""
    instruction: str
    """Instruction of the current episode in words; empty if it is always the same."""

    def reset(self, seed: int) -> Observation:
        """Begin an episode, whose initial state depends on `seed` only."""
        ...

    def step(self, action: NDArray[np.floating[Any]]) -> Step:
        """Execute an action, (action_dim,) in the simulator's units; it is clipped to the valid range."""
        ...

    def render(self, size: int) -> NDArray[np.uint8]:
        """Return an image for human viewers, (size, size, 3).

        Raises:
            RuntimeError: rendering is not available, for example without EGL.
        """
        ...

    def close(self) -> None:
        """Release resources such as a renderer; may be called twice."""
        ...


@runtime_checkable
class Instructing(Protocol):
    """A simulator whose episodes have different instructions."""

    instructions: Sequence[str]
    """All possible values of `instruction`."""


@runtime_checkable
class Demonstrating(Protocol):
    """A simulator with an expert policy, which may use state that is not in the observations."""

    def expert_action(self) -> NDArray[np.float64]:
        """Return the expert's next action, (action_dim,)."""
        ...


@runtime_checkable
class Describing(Protocol):
    """A simulator that describes its scene in words, to train vision-language models."""

    def describe(self, draw: np.random.Generator) -> list[tuple[str, str]]:
        """Return questions about the current scene with their answers; `draw` selects and orders them."""
        ...
