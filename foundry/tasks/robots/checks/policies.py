"""Check that a policy fits the other parts of a run."""

from collections.abc import Iterator
from typing import Any

from foundry.config.schemas.model import PrefixVLM
from foundry.config.schemas.root import Config
from foundry.core.errors import Violation, as_text
from foundry.tasks.robots.schemas.data import Episodes, LeRobot
from foundry.tasks.robots.schemas.evaluators import Success
from foundry.tasks.robots.schemas.model import VLA, PolicyDiT
from foundry.tasks.robots.schemas.objective import ActionChunks


def check_policies(config: Config) -> Iterator[Violation]:
    """Yield errors if success is measured without a policy, or the inputs in the data do not match the model."""
    objective, model, data = config.objective, config.model, config.data
    is_own = isinstance(objective, dict) or objective._target_ != type(objective)._target_
    for name, node in config.evaluation.evaluators.items():
        measures_success = isinstance(node, dict) and node.get("_target_") == Success._target_
        if measures_success and not is_own and not isinstance(objective, ActionChunks):
            message = f"measures a policy, which objective {type(objective).__name__} lacks; choose "
            message += "objective=diffusion_policy, or evaluation=default"
            yield Violation(f"evaluation.evaluators.{name}", message)
    if isinstance(data, Episodes):
        yield from _check_inputs(model, data)


def _check_inputs(model: Any, data: Episodes) -> Iterator[Violation]:
    """Check that the data has the inputs of a PolicyDiT or VLA, and no instructions or tokenizer without effect."""
    if isinstance(model, PolicyDiT):
        if model.image_size is not None and data.image_size is None:
            message = f"is {model.image_size} but data.image_size is null: there are no images"
            yield Violation("model.image_size", f"{message}; leave it out to follow the data")
        if data.instruction_tokens is not None:
            message = f"is {data.instruction_tokens} but model PolicyDiT does not read instructions"
            yield Violation("data.instruction_tokens", f"{message}; leave it out, or choose model=vla")
    if data.instruction_tokens is None and data.tokenizer is not None and not isinstance(model, VLA):
        message = f"is {as_text(data.tokenizer)} but has no effect without data.instruction_tokens"
        yield Violation("data.tokenizer", message)
    if isinstance(model, VLA):
        yield from _check_backbone(model.backbone, data)


def _check_backbone(backbone: PrefixVLM, data: Episodes) -> Iterator[Violation]:
    """Check that a VLA receives instructions and images that fit its backbone."""
    if data.instruction_tokens is None:
        message = "is null but model VLA reads instructions; set the maximum number of tokens of an instruction"
        yield Violation("data.instruction_tokens", f"{message}, such as 24")
    if data.image_size is None:
        is_recorded = isinstance(data, LeRobot)
        remedy = "set data.image_key" if is_recorded else "set simulator.image_size=48"
        yield Violation("data.image_size", f"is null but model VLA needs images; {remedy}")
    if data.image_size is not None and backbone.image_size != data.image_size:
        message = f"is {as_text(backbone.image_size)} but must be data.image_size={data.image_size}"
        yield Violation("model.backbone.image_size", f"{message}; leave it out to follow the data")
    for name, have, other, need in (
        ("max_seq_len", backbone.max_seq_len, "instruction_tokens", data.instruction_tokens),
        ("vocab_size", backbone.vocab_size, "vocab_size", data.vocab_size),
    ):
        if need is not None and have < need:
            message = f"is {have} but must be at least data.{other}={need}; leave it out to follow the data"
            yield Violation(f"model.backbone.{name}", message)
