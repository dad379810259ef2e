"""Builder of the objective, and a check that the model's forward() accepts the objective's arguments."""

import inspect
from typing import Any, cast

from torch import nn

from foundry.config.build import build, check_methods
from foundry.config.schemas.peft import LoRA
from foundry.core.errors import ConfigError, Violation
from foundry.core.protocols import Objective
from foundry.core.tasks import objective_bases
from foundry.parallel.process_group import World


def build_objective(node: Any, peft: Any, world: World | None = None, tokenizer: Any = None) -> Objective:
    """Build the objective, without frozen models, from the groups `objective` and `peft`.

    The objective's constructor may accept `world`, `tokenizer` and `has_adapters`.
    """
    offered = {"world": world, "tokenizer": tokenizer, "has_adapters": isinstance(peft, LoRA)}
    return with_defaults(build(node, optional=offered))


def with_defaults(part: Any) -> Objective:
    """Return the objective `part` with all attributes of `Objective`; missing ones get their defaults.

    An objective with an attribute that is a key of `Task.objectives` also gets the members of that base class.

    Raises:
        ConfigError: the object lacks `num_valid` or `loss`, does not allow new attributes, or has a method that does
            not accept the arguments that a run passes.
    """
    bases: list[type[Any]] = [*objective_bases(part), Objective]
    for base in bases:
        if not isinstance(part, base):
            _complete(part, base)
        check_methods(part, base, "objective._target_")
    return cast(Objective, part)


def _complete(part: Any, base: type[Any]) -> None:
    """Add to an object each public member of `base` that it lacks, or that is still the default of `Objective`."""
    name = type(part).__name__
    public = {key: value for key, value in vars(base).items() if not key.startswith("_")}
    defaults = {key: value for key, value in public.items() if _lacks(part, key)}
    if lacking := [f"{key}()" for key in defaults if key in Objective.__abstractmethods__]:
        message = f"returns an object of type {name} without {' and '.join(lacking)}; derive it from foundry.Objective"
        raise ConfigError(Violation("objective._target_", message))
    try:
        for key, value in defaults.items():
            object.__setattr__(part, key, value.__get__(part) if hasattr(value, "__get__") else value)
    except (AttributeError, TypeError) as error:
        message = (
            f"returns an object of type {name}, which does not allow new attributes; derive it from foundry.Objective"
        )
        raise ConfigError(Violation("objective._target_", message)) from error


def _lacks(part: Any, key: str) -> bool:
    """Return whether an object has no attribute `key`, or is an `Objective` with the default of `Objective` for it."""
    if isinstance(part, Objective):
        return inspect.getattr_static(part, key, None) is vars(Objective).get(key)
    return key not in dir(part) and not hasattr(part, key)  # dir() includes properties without reading them


def check_forward(objective: Objective, model: nn.Module, key: str = "model") -> None:
    """Refuse a model whose forward() lacks one of the objective's `forward_keywords`.

    Args:
        objective: the loss.
        model: the unwrapped model.
        key: config key of the model.

    Raises:
        ConfigError: forward() lacks a keyword.
    """
    parameters = inspect.signature(model.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    if missing := [name for name in objective.forward_keywords if name not in parameters]:
        needs = f"objective {type(objective).__name__} calls it with {' and '.join(missing)}"
        message = (
            f"is {type(model).__name__}, whose forward() lacks arguments: {needs}; add and pass them to read_log_probs"
        )
        raise ConfigError(Violation(key, message))
