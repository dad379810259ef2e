"""Schema fields that the configured part declares again as constructor parameters.

Parameters are read from the undecorated function.
"""

import inspect
from dataclasses import MISSING, dataclass, fields

from hydra.utils import get_object

from foundry.config.composition.store import GROUPS, group_schemas


@dataclass(frozen=True)
class Field:
    """A field of a schema whose `_target_` is a class or function of foundry.

    Attributes:
        path: dotted name, such as "objective.GRPO.ratio_clip_min".
        is_parameter: whether the target has a parameter of that name.
        has_second_default: whether that parameter has a default, in addition to the field's.
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
    part = get_object(target)
    function = part.__init__ if isinstance(part, type) else getattr(part, "__func__", part)
    return inspect.signature(inspect.unwrap(function)).parameters


def _declared(parameters, name):
    parameter = parameters.get(name)
    return parameter is not None, parameter is not None and parameter.default is not inspect.Parameter.empty
