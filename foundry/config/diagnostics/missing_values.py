"""Checks for values of a composed configuration that are missing, cannot be resolved, or are not in a schema."""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, cast

from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf, ValueNode
from omegaconf.errors import InterpolationKeyError, InterpolationToMissingValueError, OmegaConfBaseException

from foundry.config.composition.hydra_application import is_plugin
from foundry.config.composition.hydra_versions import is_refused, log_targets, refusal
from foundry.config.diagnostics.expected_value import expected_kind
from foundry.config.diagnostics.names import did_you_mean
from foundry.config.diagnostics.other_frameworks import hint
from foundry.config.schemas.launcher import is_known, is_own
from foundry.config.schemas.root import Config
from foundry.config.schemas.sweeper import SCHEMAS as SWEEPERS
from foundry.core.errors import Violation, as_text, first_line


def missing_values(parent: DictConfig | ListConfig, key: Any, path: str) -> Iterator[Violation]:
    """Yield an error for each value at or below `key` that is missing, cannot be resolved, or is not in a schema."""
    schema: Any = OmegaConf.get_type(parent)
    field_names = _field_names(schema)
    node: Any = parent._get_child(key, validate_access=False)  # `OmegaConf.is_missing` takes four times as long
    if field_names is not None and key not in field_names:
        parent_path = path.rpartition(".")[0]
        settings = [f"{parent_path}.{name}" if parent_path else name for name in field_names]
        hints = {leaf: hint(leaf, value, settings) for leaf, value in _leaves(node, path)}
        if not any(hints.values()):
            hints = {path: did_you_mean(path, settings, value=as_override(node))}
        for leaf, remedy in hints.items():
            yield Violation(leaf, f"is not a key of {parent_path or 'the configuration'}{remedy}")
    elif node._is_missing():
        doc = schema.__dataclass_fields__[key].metadata.get("doc", "") if is_dataclass(schema) else ""
        yield Violation(path, f"has no value{f' ({doc})' if doc else ''}; give it as {path}=...")
    elif node._is_interpolation():
        raw = node._value()
        try:
            value = parent[key]
        except OmegaConfBaseException as error:
            yield Violation(path, _interpolation_error(str(raw), path, error))
        else:
            if field_names is not None and schema is not Config and not _is_alike(node, value):
                yield Violation(path, f"is {as_text(raw)}, which resolves to another kind of value; set {path}=...")
    elif isinstance(node, DictConfig) and not node._is_none():
        names = _field_names(cast(Any, OmegaConf.get_type(node)))
        for name, child in cast(dict[Any, Any], node._content).items():
            if not _is_plain(child) or (names is not None and name not in names):
                yield from missing_values(node, name, f"{path}.{name}")
    elif isinstance(node, ListConfig) and not node._is_none():
        for index, child in enumerate(cast(list[Any], node._content)):
            if not _is_plain(child):
                yield from missing_values(node, index, f"{path}[{index}]")


def _is_plain(node: Any) -> bool:
    """Return True for a node with a single value that is set and is no interpolation."""
    value = node._value()
    return isinstance(node, ValueNode) and (not isinstance(value, str) or (value != MISSING and "${" not in value))


@cache
def _field_names(schema: Any) -> frozenset[str] | None:
    """Return the names of the fields of a schema; None for a mapping without a schema."""
    return frozenset(item.name for item in fields(schema)) if is_dataclass(schema) else None


def as_override(node: object) -> str:
    """Format the value of a node or of a file as in an override."""
    value = node._value() if isinstance(node, ValueNode) else node
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _leaves(node: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path of each value in a node, with the value formatted as in an override."""
    if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing() and len(node):
        for name in map(str, node):
            yield from _leaves(node._get_node(name), f"{path}.{name}")
    else:
        yield path, as_override(node)


def _interpolation_error(interpolation: str, path: str, error: Exception) -> str:
    remedy = f"set {path}=..."
    if reference := re.fullmatch(r"\$\{(\.*[\w.]+)\}", interpolation):
        if isinstance(error, InterpolationKeyError | InterpolationToMissingValueError):
            group = path.partition(".")[0]
            alternative = "" if group == "hydra" else f" or choose another {group}"
            return f"refers to {reference[1]}, which has no value here; {remedy}{alternative}"
        if reference[1] == path:
            return f"refers to itself; {remedy}"
    if (kind := expected_kind(error)) is not None:
        return f"is {as_text(interpolation)}, which does not resolve to {kind}; {remedy}"
    return f"is {as_text(interpolation)}, which cannot be resolved: {first_line(str(error))}; {remedy}"


def _is_alike(node: Any, value: object) -> bool:
    """Return True if an interpolation resolves to the kind of value that its field takes.

    The kinds are a mapping with the schema of the field, a list, and a single value.
    """
    if any(isinstance(node, kind) != isinstance(value, kind) for kind in (DictConfig, ListConfig)):
        return False
    field_type: Any = node._metadata.ref_type
    value_type: Any = OmegaConf.get_type(value) if isinstance(value, DictConfig) else None
    if value_type is None or not isinstance(field_type, type) or not hasattr(field_type, "__dataclass_fields__"):
        return value_type is None or not is_dataclass(value_type)
    return issubclass(value_type, field_type)


def check_hydra(composed: DictConfig) -> Iterator[Violation]:
    """Yield errors of launcher and sweeper, and functions in the logging settings that Hydra refuses.

    A launcher or sweeper must be a mapping for one of Hydra's plugins. With foundry's schema, the errors of
    `missing_values` are added.
    """
    for name in ("launcher", "sweeper"):
        hydra = OmegaConf.select(composed, "hydra")
        if hydra is None or name not in hydra._content:
            continue
        is_open = OmegaConf.is_missing(hydra, name) or OmegaConf.is_interpolation(hydra, name)
        if not is_open and not isinstance(hydra._get_node(name), DictConfig):
            remedy = f"to choose an option write hydra/{name}=..."
            yield Violation(f"hydra.{name}", f"is {as_text(hydra[name])} but must be a mapping; {remedy}")
            continue
        target = None if is_open else _plain_text(hydra[name], "_target_")
        may_be_own = name == "launcher" and not is_open and is_own(hydra[name])
        if target is not None and not is_plugin(target) and (is_refused(target) or not may_be_own):
            message = f"is {target}, which is not a {name}; choose one with hydra/{name}=..."
            yield Violation(f"hydra.{name}._target_", message)
            continue
        if is_open or (is_known(hydra[name]) if name == "launcher" else OmegaConf.get_type(hydra, name) in SWEEPERS):
            yield from missing_values(hydra, name, f"hydra.{name}")
    for name in ("hydra_logging", "job_logging"):
        try:
            settings = OmegaConf.to_container(OmegaConf.select(composed, f"hydra.{name}"), resolve=False)
        except (OmegaConfBaseException, ValueError):  # missing, or an error that Hydra reports
            continue
        for target in filter(is_refused, log_targets(settings)):
            yield Violation(f"hydra.{name}", refusal(target))


def _plain_text(parent: DictConfig | None, key: str) -> str | None:
    """Return a value that is a text; None if it is missing, an interpolation, or of another type."""
    if parent is None or OmegaConf.is_missing(parent, key) or OmegaConf.is_interpolation(parent, key):
        return None
    value = parent.get(key)
    return value if isinstance(value, str) else None
