"""What a composed configuration must satisfy to measure success in a simulator."""

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from foundry.config.build import field_of
from foundry.config.errors import Violation, shown
from foundry.config.metrics import SUCCESS
from foundry.config.schemas.root import Config

MOST_EPISODES = 2**32
"""Episodes there are: evaluation has the simulator's seeds below this, demonstrations those from it on."""


class Told(Enum):
    """Which instruction a policy is told.

    Attributes:
        own: the episode's.
        other: another of the simulator's; success is still that of the episode's own.
    """

    own = "own"
    other = "other"


_LEAST = {"episodes": 1, "at_a_time": 1, "num_observations": 1, "first_episode": 0}


def check_success(config: Config) -> Iterator[Violation]:
    """Evaluators of success have a simulator, and whole numbers that say which episodes are run."""
    for name, node in config.evaluation.evaluators.items():
        if not isinstance(node, dict) or node.get("_target_") != SUCCESS:
            continue
        key = f"evaluation.evaluators.{name}"
        yield from _check_told(node, key, field_of(config.data, "instruction_tokens"))
        if field_of(config.simulator, "_target_") is None:
            yield Violation(key, "acts in a simulator but simulator is none; choose one, or evaluation=default")
        given = {setting: node[setting] for setting in _LEAST if setting in node}
        wrong = [setting for setting, value in given.items() if type(value) is not int or value < _LEAST[setting]]
        for setting in wrong:
            message = f"is {shown(given[setting])} but must be a whole number from {_LEAST[setting]} on"
            yield Violation(f"{key}.{setting}", message)
        last = given.get("first_episode", 0) + given.get("episodes", 1) if not wrong else 0
        if last > MOST_EPISODES:
            message = f"leads to episode {last - 1} but the last one is {MOST_EPISODES - 1}; choose a smaller one"
            yield Violation(f"{key}.first_episode", message)


def _check_told(node: Mapping[str, Any], key: str, instruction_tokens: Any) -> Iterator[Violation]:
    """What a policy is told is what it was trained with, and another instruction only where it is told any."""
    told, tokens = node.get("instruction", Told.own.value), node.get("instruction_tokens")
    if told not in [one.value for one in Told]:
        yield Violation(f"{key}.instruction", f"is {shown(told)} but must be own or other")
    elif told == Told.other.value and tokens is None:
        message = "is other but the policy is told nothing; set data.instruction_tokens, or this to own"
        yield Violation(f"{key}.instruction", message)
    if tokens != instruction_tokens:
        message = f"is {shown(tokens)} but must be data.instruction_tokens={shown(instruction_tokens)}"
        yield Violation(f"{key}.instruction_tokens", f"{message}; set it to ${{data.instruction_tokens}}")
