"""Checks of types and bounds in plain mappings: built-in parts that are chosen by `_target_`.

Evaluators and trackers have names that the user chooses, and a built-in part may be nested in a part of the user. No
schema is composed for these mappings, so the schema is looked up by `_target_`. `targets.py` checks unknown and missing
arguments.
"""

from collections.abc import Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

from omegaconf import Container, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from foundry.config.build import HYDRA_KEYS
from foundry.config.composition.store import GROUPS, evaluator_schemas, group_schemas, schemas_in, writable
from foundry.config.diagnostics.expected_value import expected_kind
from foundry.config.diagnostics.other_frameworks import names_of
from foundry.config.schemas import built_in_trackers
from foundry.config.schemas.evaluation import Evaluation
from foundry.config.schemas.model import HuggingFace, Transformer
from foundry.config.schemas.tracking import Tracking
from foundry.config.setting import check_value
from foundry.core.errors import Violation, as_text

_RUN_ARGUMENTS = {*Evaluation.offered, *Tracking.offered}
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


def check_plain_nodes(value: Any, key: str) -> Iterator[Violation]:
    """Check the settings of every built-in part in a plain mapping, and the sizes in every transformers config.

    Args:
        value: a group of settings, or a value in a group.
        key: dotted key of `value`.
    """
    children: Mapping[str, Any] = {}
    if is_dataclass(value):
        children = {item.name: getattr(value, item.name) for item in fields(value)}
    elif isinstance(value, dict):
        children = value
        yield from check_node(value, key)
    elif isinstance(value, list):
        children = {str(number): item for number, item in enumerate(value)}
    if children.get("_target_") == HuggingFace._target_:
        yield from _check_sizes(children.get("config"), f"{key}.config")
    for name, item in children.items():
        yield from check_plain_nodes(item, f"{key}.{name}")


def check_node(node: Mapping[str, Any], key: str) -> Iterator[Violation]:
    """Check the settings of one mapping with a `_target_`. Yields nothing if the target is not a built-in part.

    Args:
        node: the resolved mapping.
        key: dotted key of the mapping.
    """
    schemas = _schemas().get(str(node.get("_target_")), []) if len(node) > 1 else []
    values = {name: value for name, value in node.items() if name not in HYDRA_KEYS} if schemas else {}
    for name, value in values.items():
        settings = [(schema, item) for schema in schemas for item in fields(schema) if item.name == name]
        violations = [list(_check_value(schema, item, value, f"{key}.{name}")) for schema, item in settings]
        if violations and all(violations):
            yield from violations[0]
        elif not settings and name in _RUN_ARGUMENTS and key.count(".") == 2:
            yield Violation(f"{key}.{name}", f"is {as_text(value)} but the run sets it; leave it out")


def _check_sizes(config: Any, key: str) -> Iterator[Violation]:
    """Check the sizes in a transformers config against the bounds of the built-in decoder."""
    for name, value in config.items() if isinstance(config, dict) else ():
        item = _sizes().get(str(name))
        if item is not None and value is not None and not isinstance(value, (dict, list)):
            yield from _check_value(Transformer, item, value, f"{key}.{name}")


@cache
def _sizes() -> dict[str, "Field[Any]"]:
    """Return the decoder's numeric fields with bounds, keyed by their names in foundry and in other frameworks."""
    numbers = [item for item in fields(Transformer) if item.metadata.get("bounds") and item.type in (int, float)]
    return {name: item for item in numbers for name in (item.name, *names_of(f"model.{item.name}"))}


@cache
def _schemas() -> dict[str, list[type[Any]]]:
    """Return the schemas of built-in parts, keyed by `_target_`; several schemas may share one target."""
    schemas_by_target: dict[str, list[type[Any]]] = {}
    groups = [schema for group in GROUPS for schema in group_schemas(group).values()]
    for schema in [*groups, *evaluator_schemas(), *schemas_in(built_in_trackers)]:
        target = getattr(schema, "_target_", None)
        if isinstance(target, str):
            schemas_by_target.setdefault(target, []).append(schema)
    return schemas_by_target


def _check_value(schema: type[Any], item: "Field[Any]", value: Any, key: str) -> Iterator[Violation]:
    """Check a value that the constructor receives unconverted; a schema would convert the text 5 to a number."""
    if isinstance(value, str) and "${" in value:
        return  # assigning the text to the node would make an interpolation of it
    node = writable(schema)
    try:
        OmegaConf.update(node, item.name, value, merge=False)
        typed_value = node[item.name]
    except (OmegaConfBaseException, ValueError, TypeError, OverflowError) as error:
        expected = expected_kind(error) or ("a value other than null" if value is None else "of another type")
        yield Violation(key, f"is {as_text(value)} but must be {expected}")
        return
    if typed_value is None:
        return
    if isinstance(typed_value, Enum) and value != typed_value.name:
        yield Violation(key, f"is {as_text(value)} but must be one of {', '.join(type(typed_value).__members__)}")
    elif (
        isinstance(typed_value, (Container, Enum))
        or (type(typed_value), type(value)) == (float, int)
        or type(typed_value) is type(value)
    ):
        yield from check_value(item, value, key)
    else:
        yield Violation(key, f"is {as_text(value)} but must be {_KINDS.get(type(typed_value), 'of another type')}")
