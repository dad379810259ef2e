"""Instantiation of a part from its configuration, and a check of its methods."""

import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from foundry.config.composition.hydra_versions import instantiate, targets_allowed
from foundry.core.errors import ConfigError, Violation

HYDRA_KEYS = ("_target_", "_args_", "_partial_", "_recursive_", "_convert_", "_isolate_")
"""Keys that `hydra.utils.instantiate` interprets, at any depth of its argument; `_isolate_` since Hydra 1.4."""

FOR_THE_BUILDER = ("init_from",)
"""Fields of a part's configuration that are not arguments of the part but are applied by the caller afterwards."""


def build(node: Any, *, optional: Mapping[str, Any] | None = None, **runtime: Any) -> Any:
    """Instantiate the `_target_` of `node` with the node's fields and with values that exist only at run time.

    Args:
        node: mapping or schema with `_target_`.
        optional: keyword arguments, each passed only if the part has a parameter of the same name that `node` does
            not set.
        runtime: keyword arguments passed as they are, without being merged into the configuration or copied.
    """
    if not isinstance(node, DictConfig):
        node = OmegaConf.create(node) if isinstance(node, dict) else OmegaConf.structured(node)
    content = _part_fields(node)
    part = instantiate(content)
    with targets_allowed(content):
        return part(**runtime, **_accepted_arguments(part, optional or {}))


def check_methods(part: Any, base: type[Any], key: str) -> None:
    """Check the methods of a part before a run calls them; see `find_method_problem`.

    Raises:
        ConfigError: a method is missing, or does not accept the arguments; its key is `key`.
    """
    if problem := find_method_problem(part, base):
        raise ConfigError(Violation(key, problem))


def find_method_problem(part: Any, base: type[Any]) -> str | None:
    """Find a method of a part that is missing, or that does not accept the arguments that a run passes by position.

    Args:
        part: the part.
        base: protocol or base class; its public methods have these arguments.

    Returns:
        The problem, to be put after the name of the part's function; None if there is no problem.
    """
    returns = f"returns an object of type {type(part).__name__}"
    for name, member in vars(base).items():
        if name.startswith("_") or not inspect.isfunction(member):
            continue
        passed = list(inspect.signature(member).parameters)[1:]
        call = f"{name}({', '.join(passed)})"
        method = getattr(part, name, None)
        if not callable(method):
            return f"{returns}, which has no method {call}"
        try:
            accepted = inspect.signature(method)
        except ValueError:  # a method of a compiled extension
            continue
        try:
            accepted.bind(*passed)
        except TypeError:
            names = [parameter.replace(annotation=parameter.empty) for parameter in accepted.parameters.values()]
            own = f"{name}{accepted.replace(parameters=names, return_annotation=accepted.empty)}"
            return f"{returns}, whose {own} does not accept a call of {call}"
    return None


def field_of(node: Any, name: str, default: Any = None) -> Any:
    """Return a field of a part's schema, or of a plain mapping."""
    return node.get(name, default) if isinstance(node, dict) else getattr(node, name, default)


def weights_of_parts(node: Any, prefix: str = "") -> dict[str, str]:
    """Return each `init_from` that a nested part of a model sets, keyed by the dotted name of the part in the model."""
    paths = dict[str, str]()
    children = node if isinstance(node, dict) else {item.name: getattr(node, item.name) for item in fields(node)}
    for key, value in children.items():
        name = f"{prefix}{key}"
        if is_dataclass(value) or (isinstance(value, dict) and "_target_" in value):
            path = field_of(value, "init_from")
            paths |= weights_of_parts(value, f"{name}.") if path is None else {name: str(path)}
    return paths


def _part_fields(node: DictConfig) -> DictConfig:
    """Return a part's configuration without the fields in `FOR_THE_BUILDER`, also in nested parts."""
    content = dict[str, Any]()
    for key in map(str, node):
        child = node._get_node(key)
        is_part = isinstance(child, DictConfig) and not child._is_none() and "_target_" in child
        if key not in FOR_THE_BUILDER:
            content[key] = _part_fields(cast(DictConfig, child)) if is_part else child
    return DictConfig(content)


def _accepted_arguments(part: partial[Any], optional: Mapping[str, Any]) -> dict[str, Any]:
    try:
        names = inspect.signature(part.func).parameters
    except ValueError:  # Python cannot read the signature of some compiled functions
        return {}
    return {name: value for name, value in optional.items() if name in names and name not in part.keywords}
