"""The objective, and a check of the model's forward pass."""

import inspect
from typing import Any

from torch import nn

from foundry.config.build import build
from foundry.config.schemas.peft import LoRA
from foundry.core.errors import ConfigError, Violation
from foundry.core.protocols import Objective
from foundry.parallel.process_group import World


def build_objective(node: Any, peft: Any, world: World | None = None, tokenizer: Any = None) -> Objective:
    """Build the objective, without frozen models, from the groups `objective` and `peft`.

    It gets the ranks, the tokenizer, and if there are adapters, where it takes it.
    """
    offered = {"world": world, "tokenizer": tokenizer, "has_adapters": isinstance(peft, LoRA)}
    objective: Objective = build(node, offered=offered)
    return objective


def check_forward(objective: Objective, model: nn.Module, key: str = "model") -> None:
    """Refuse a model whose forward() lacks a keyword that the objective calls it with, its `forward_keywords`.

    Args:
        objective: what is minimised.
        model: not yet wrapped.
        key: of the settings that the model is built from.

    Raises:
        ConfigError: it lacks one.
    """
    parameters = inspect.signature(model.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    if missing := [name for name in getattr(objective, "forward_keywords", ()) if name not in parameters]:
        needs = f"objective {type(objective).__name__} calls it with {' and '.join(missing)}"
        message = f"is {type(model).__name__}, whose forward() does not take what {needs}; pass it on to read_log_probs"
        raise ConfigError(Violation(key, message))
