"""Values of foundry's own parts that stand in plain mappings, where composition knows no schema: types and bounds.

Evaluators and trackers are chosen by a name of the user's own, and any part may stand inside of a user's own part. The
schema is found by `_target_`. Unknown and missing arguments are the subject of `targets.py`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

from omegaconf import Container
from omegaconf.errors import OmegaConfBaseException

from foundry.config.build import HYDRA_KEYS
from foundry.config.errors import Violation, shown
from foundry.config.schemas import own_evaluators, own_trackers
from foundry.config.schemas.evaluation import Evaluation
from foundry.config.schemas.model import HuggingFace, Transformer
from foundry.config.schemas.root import Config
from foundry.config.schemas.tracking import Tracking
from foundry.config.setting import check_value
from foundry.config.store import GROUPS, group_schemas, schemas_in, writable
from foundry.config.wanted import wanted

_GIVEN = {*Evaluation.offered, *Tracking.offered}
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def check_plain_nodes(config: Config) -> Iterator[Violation]:
    """Check the values of every part of foundry's own that stands in a plain mapping."""
    for item in fields(config):
        yield from _check_inside(getattr(config, item.name), item.name)


def check_node(node: Mapping[str, Any], key: str) -> Iterator[Violation]:
    """Check the values of one mapping with a `_target_`; nothing is said about a part that is not foundry's own.

    Args:
        node: the mapping, resolved.
        key: its dotted key.
    """
    schemas = _schemas().get(str(node.get("_target_")), []) if len(node) > 1 else []
    given = {name: value for name, value in node.items() if name not in HYDRA_KEYS} if schemas else {}
    for name, value in given.items():
        settings = [(schema, item) for schema in schemas for item in fields(schema) if item.name == name]
        wrong = [list(_check_value(schema, item, value, f"{key}.{name}")) for schema, item in settings]
        if wrong and all(wrong):
            yield from wrong[0]
        elif not settings and name in _GIVEN and key.count(".") == 2:
            yield Violation(f"{key}.{name}", f"is {shown(value)} but the run gives it; leave it out")


def _check_inside(value: Any, key: str) -> Iterator[Violation]:
    inside: Mapping[str, Any] = {}
    if is_dataclass(value):
        inside = {item.name: getattr(value, item.name) for item in fields(value)}
    elif isinstance(value, dict):
        inside = value
        yield from check_node(value, key)
    elif isinstance(value, list):
        inside = {str(number): item for number, item in enumerate(value)}
    if inside.get("_target_") == HuggingFace._target_:
        yield from _check_sizes(inside.get("config"), f"{key}.config")
    for name, item in inside.items():
        yield from _check_inside(item, f"{key}.{name}")


def _check_sizes(config: Any, key: str) -> Iterator[Violation]:
    """Hold the sizes of a transformers config to the bounds that foundry's own decoder has for them."""
    for name, value in config.items() if isinstance(config, dict) else ():
        item = _sizes().get(str(name))
        if item is not None and value is not None and not isinstance(value, (dict, list)):
            yield from _check_value(Transformer, item, value, f"{key}.{name}")


@cache
def _sizes() -> dict[str, "Field[Any]"]:
    """Return the numbers of foundry's own decoder by their names here and in other systems."""
    numbers = [item for item in fields(Transformer) if item.metadata.get("bounds") and item.type in (int, float)]
    return {name: item for item in numbers for name in (item.name, *item.metadata["aliases"].split(", ")) if name}


@cache
def _schemas() -> dict[str, list[type[Any]]]:
    """Return the schemas of foundry's own parts by `_target_`; several may share one."""
    found: dict[str, list[type[Any]]] = {}
    groups = [schema for group in GROUPS for schema in group_schemas(group).values()]
    for schema in [*groups, *schemas_in(own_evaluators), *schemas_in(own_trackers)]:
        target = getattr(schema, "_target_", None)
        if isinstance(target, str) and target.startswith("foundry."):
            found.setdefault(target, []).append(schema)
    return found


def _check_value(schema: type[Any], item: "Field[Any]", value: Any, key: str) -> Iterator[Violation]:
    """Check a value that a constructor is given as it is: unlike a schema's, it is not converted to the type."""
    if isinstance(value, str) and "${" in value:
        return  # a text with braces, which assignment would take for an interpolation
    node = writable(schema)
    try:
        node[item.name] = value
        own = node[item.name]
    except (OmegaConfBaseException, ValueError, TypeError, OverflowError) as error:
        needed = wanted(error) or ("a value" if value is None else "of another type")
        yield Violation(key, f"is {shown(value)} but must be {needed}")
        return
    if own is None:
        return
    if isinstance(own, Enum) and value != own.name:
        yield Violation(key, f"is {shown(value)} but must be one of {', '.join(type(own).__members__)}")
    elif isinstance(own, (Container, Enum)) or (type(own), type(value)) == (float, int) or type(own) is type(value):
        yield from check_value(item, value, key)
    else:
        yield Violation(key, f"is {shown(value)} but must be {_KINDS.get(type(own), 'of another type')}")
