"""Reading of settings recorded by other runs and other people: treated as data, never executed."""

import re
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints

from foundry.config.build import HYDRA_KEYS
from foundry.config.composition.store import evaluator_schemas, group_schemas
from foundry.config.record.secrets import VARIABLE
from foundry.config.record.strict_yaml import read_yaml
from foundry.config.schemas.tracking import EXTRAS
from foundry.core.errors import ConfigError, Violation, as_text
from foundry.core.part_names import current_path, public_name
from foundry.core.tasks import missing_task

_MAX_BITS = 64
_NAMED_PART = re.compile(r"(evaluation\.evaluators|tracking\.trackers)\.\w+\._target_")
_METRIC = re.compile(r"evaluation\.evaluators\.\w+\.torchmetrics\.\w+\._target_")
_OF_TORCHMETRICS = re.compile(r"torchmetrics\.(text|classification|regression)\.(?!BERTScore|InfoLM)[A-Z]\w*")
"""Metrics of torchmetrics that only compute. The two excluded classes load a model from a path in their arguments."""
_ATTENTIONS = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")


def read_settings(path: Path, key: str) -> dict[str, Any]:
    """Return the settings in a file of a run directory as plain containers.

    Args:
        path: the file.
        key: option that names the directory, for messages.

    Raises:
        ConfigError: if the file cannot be read or has no settings, or if a value is one that foundry never records,
            such as an interpolation. A reference to an environment variable, recorded for a secret, is accepted.
    """
    try:
        content = read_yaml(path)
    except FileNotFoundError:
        message = f"{path.parent} is not a run directory: it has no {path.name}"
        raise ConfigError(Violation(key, message)) from None
    except (ValueError, OSError) as error:
        raise ConfigError(Violation(key, f"{path.parent} cannot be read: {error}")) from None
    if not isinstance(content, dict):
        raise ConfigError(
            Violation(key, f"{path} has no settings: it is {'empty' if content is None else 'not a mapping'}")
        )
    for setting, value in _leaves(content, ""):
        if reason := _strange_reason(value):
            raise ConfigError(Violation(key, f"{path} has {setting}={as_text(value)}; {reason}"))
    return content


def foreign_parts(content: dict[str, Any]) -> Iterator[str]:
    """Yield each recorded setting, as key=value, that would run code which is not built into foundry.

    A `_target_` is built in if it is, by its public name or an older path, one of the following:

    - the default of a schema of its group, or of a part nested in that schema,
    - an evaluator or tracker of foundry,
    - a torchmetrics metric passed to an evaluator of foundry.

    All other keys that Hydra interprets are foreign, at any depth. So are:

    - kernels that transformers would download from a hub,
    - settings through which a part would run foreign code (`foreign_settings` of its schema),
    - references to environment variables inside of parts.
    """
    for group, node in content.items():
        built_in = {f"{group}._target_": built_in_targets(group), **_nested_targets(group)}
        for path, name, value in _keys(node, group):
            target = public_name(value) if isinstance(value, str) else value
            is_built_in = target in built_in.get(path, built_in_named_parts() if _NAMED_PART.fullmatch(path) else ())
            is_built_in |= bool(_METRIC.fullmatch(path) and _OF_TORCHMETRICS.fullmatch(str(value)))
            is_none = path in built_in and value is None  # null in place of an optional part, e.g. no environment
            is_hydra = name in HYDRA_KEYS and not is_built_in and not is_none
            is_kernel = str(name).endswith("attn_implementation") and value not in (None, *_ATTENTIONS)
            if is_hydra or is_kernel:
                yield f"{path}={as_text(value)}"
        for schema in group_schemas(group).values() if isinstance(node, dict) else ():
            if hasattr(schema, "foreign_settings") and public_name(str(node.get("_target_"))) == schema._target_:
                yield from (f"{group}.{name}={as_text(node[name])}" for name in schema.foreign_settings(node))
        for path, value in _leaves(node, group) if built_in_targets(group) else ():
            if isinstance(value, str) and "${" in value:
                yield f"{path}={as_text(value)}"


def missing_tasks(content: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each task that the settings refer to but that is not installed."""
    lines = dict[str, str]()
    for path, name, value in _keys(content, ""):
        if name == "_target_" and isinstance(value, str) and (task := missing_task(current_path(value))) is not None:
            lines.setdefault(task, f"belongs to the task {task}, which is not installed here: {path}={as_text(value)}")
    yield from lines.values()


def missing_packages(content: dict[str, Any]) -> dict[str, str]:
    """Return the packages of `_target_`s that Python cannot find, each with the key=value that refers to it."""
    packages = dict[str, str]()
    for path, name, value in _keys(content, ""):
        package = value.partition(".")[0] if name == "_target_" and isinstance(value, str) else ""
        if package.isidentifier() and package not in {*packages, *sys.modules} and find_spec(package) is None:
            packages[package] = f"{path}={as_text(value)}"
    return packages


def variables(content: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield path and text of each setting that holds a reference to an environment variable in place of a secret."""
    for path, _, value in _keys(content, ""):
        if isinstance(value, str) and VARIABLE.search(value):
            yield path, value


@cache
def built_in_targets(group: str) -> tuple[str, ...]:
    """Return the `_target_` of each built-in part of a group; empty if the group has no parts."""
    defaults = (item.default for s in group_schemas(group).values() for item in fields(s) if item.name == "_target_")
    return tuple(dict.fromkeys(default for default in defaults if isinstance(default, str)))


@cache
def built_in_named_parts() -> tuple[str, ...]:
    """Return the `_target_` of each evaluator and tracker of foundry and of installed tasks."""
    return (*(schema._target_ for schema in evaluator_schemas()), *EXTRAS)


def _nested_targets(group: str) -> dict[str, tuple[str, ...]]:
    """Return the `_target_`s of parts nested in the built-in parts of a group, by their path."""
    targets = dict[str, tuple[str, ...]]()
    for schema in group_schemas(group).values():
        for name, kind in get_type_hints(schema).items():
            if is_dataclass(kind) and (target := getattr(kind, "_target_", None)) is not None:
                path = f"{group}.{name}._target_"
                targets[path] = (*targets.get(path, ()), str(target))
    return targets


def _strange_reason(value: object) -> str:
    """Return the reason why foundry cannot have recorded a value; empty if foundry may have recorded the value."""
    if isinstance(value, str) and "${" in VARIABLE.sub("", value):
        return "recorded settings have no interpolations"
    if value == "???":
        return "recorded settings are never missing"
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return "no setting can be this large"
    return ""


def _keys(node: Any, path: str) -> Iterator[tuple[str, object, object]]:
    """Yield path, name and value of every key at any depth."""
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, value in children:
        child_path = f"{path}.{as_text(name)}" if path else as_text(name)
        if isinstance(node, dict):
            yield child_path, name, value
        yield from _keys(value, child_path)


def _leaves(node: Any, path: str) -> Iterator[tuple[str, object]]:
    """Yield every name and every value that is not a container, with its path."""
    for key, name, value in _keys(node, path):
        yield key, name
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, (dict, list)):
                yield key, item
