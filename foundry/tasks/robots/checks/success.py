"""Check the settings that measure success in a simulator."""

from collections.abc import Iterator, Mapping
from typing import Any

from foundry.config.build import field_of
from foundry.config.composition.plain_nodes import check_node
from foundry.config.schemas.root import Config
from foundry.core.errors import Violation, as_text
from foundry.tasks.robots.schemas.evaluators import MOST_EPISODES, InstructionChoice, Success


def check_success(config: Config) -> Iterator[Violation]:
    """Check that evaluators of success have a simulator, valid settings, and the instruction length of the data."""
    for name, node in config.evaluation.evaluators.items():
        if not isinstance(node, dict) or node.get("_target_") != Success._target_:
            continue
        key = f"evaluation.evaluators.{name}"
        yield from _check_instruction(node, key, field_of(config.data, "instruction_tokens"))
        if field_of(config.simulator, "_target_") is None:
            yield Violation(key, "needs a simulator but simulator=none; choose one, or evaluation=default")
        violations = list(check_node(node, key))
        yield from violations
        last = node.get("first_episode", 0) + node.get("episodes", 1) if not violations else 0
        if last > MOST_EPISODES:
            message = f"leads to episode {last - 1} but the last one is {MOST_EPISODES - 1}; choose a smaller one"
            yield Violation(f"{key}.first_episode", message)


def _check_instruction(node: Mapping[str, Any], key: str, instruction_tokens: Any) -> Iterator[Violation]:
    """Check that `instruction_tokens` equals that of the data, and is set if `instruction` is `other`."""
    instruction, tokens = node.get("instruction", InstructionChoice.own.value), node.get("instruction_tokens")
    if instruction == InstructionChoice.other.value and tokens is None:
        message = "is other but the policy reads no instructions; set data.instruction_tokens, or set this to own"
        yield Violation(f"{key}.instruction", message)
    if tokens != instruction_tokens:
        message = f"is {as_text(tokens)} but must be data.instruction_tokens={as_text(instruction_tokens)}"
        yield Violation(f"{key}.instruction_tokens", f"{message}; set it to ${{data.instruction_tokens}}")
