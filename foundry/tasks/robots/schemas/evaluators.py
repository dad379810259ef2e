"""Settings of the evaluators of policies, which the user selects by `_target_`."""

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from foundry.config.setting import setting
from foundry.tasks.robots.names import SUCCESS_METRICS

MOST_EPISODES = 2**32
"""Number of episodes for evaluations, with simulator seeds below this; demonstrations use the seeds from it on."""


class InstructionChoice(Enum):
    """Choice of the instruction that a policy receives.

    Attributes:
        own: the episode's instruction.
        other: another instruction of the simulator; success is still measured for the episode's own.
    """

    own = "own"
    other = "other"


@dataclass(frozen=True, kw_only=True)
class Success:
    """Success of a policy in simulated episodes."""

    metrics: ClassVar[tuple[str, ...]] = SUCCESS_METRICS

    _target_: str = "foundry.evals.Success"
    num_observations: int = setting(2, "number of observations that the policy sees", ge=1, le=1024)
    episodes: int = setting(50, "number of episodes to run", ge=1, le=MOST_EPISODES)
    at_a_time: int = setting(25, "episodes that share a forward pass, each with a separate simulator", ge=1, le=10**6)
    first_episode: int = setting(0, "number of the first episode", ge=0, le=MOST_EPISODES - 1)
    draw: bool = setting(True, "draw the first episodes as an animation")
    instruction_tokens: int | None = setting(None, "maximum tokens of an instruction; null: no instructions", ge=1)
    instruction: InstructionChoice = setting(
        InstructionChoice.own, "instruction for the policy: own: the episode's; other: a different one of the simulator"
    )
