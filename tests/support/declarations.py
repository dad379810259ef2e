"""Fields of schemas that the part which they configure declares again, as parameters of its constructor."""

import inspect
from dataclasses import MISSING, dataclass, fields

from hydra.utils import get_class, get_object

from foundry.config.composition.store import GROUPS, group_schemas


@dataclass(frozen=True)
class Field:
    """A schema field whose `_target_` is a class or function of foundry.

    Attributes:
        path: such as "objective.GRPO.ratio_clip_min".
        is_parameter: the target has a parameter of that name.
        has_second_default: the parameter has a default.
    """

    path: str
    is_parameter: bool
    has_second_default: bool


def fields_of_parts() -> list[Field]:
    """Return the fields of all schemas with a `_target_` in foundry."""
    return [
        Field(f"{group}.{name}.{field.name}", *_declared(parameters, field.name))
        for group in GROUPS
        for name, schema in group_schemas(group).items()
        if (parameters := _parameters(schema)) is not None
        for field in fields(schema)
        if not field.name.startswith("_")
    ]


def _parameters(schema):
    target = next((field.default for field in fields(schema) if field.name == "_target_"), MISSING)
    if not isinstance(target, str) or not target.startswith("foundry."):
        return None
    try:
        return inspect.signature(get_object(target)).parameters
    except ValueError:  # a class
        return inspect.signature(get_class(target)).parameters


def _declared(parameters, name):
    parameter = parameters.get(name)
    return parameter is not None, parameter is not None and parameter.default is not inspect.Parameter.empty
