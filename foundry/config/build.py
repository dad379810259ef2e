"""Turning a part's configuration into the part."""

import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

HYDRA_KEYS = ("_target_", "_args_", "_partial_", "_recursive_", "_convert_")
"""What `hydra.utils.instantiate` obeys, at any depth of what it is given."""

FOR_THE_BUILDER = ("init_from",)
"""Fields of a part's configuration that say what happens to the part afterwards, and are not its own."""


def build(node: Any, *, offered: Mapping[str, Any] | None = None, **runtime: Any) -> Any:
    """Instantiate `node._target_` with its fields, and with what only the running program knows.

    Args:
        node: a mapping or schema with `_target_`.
        offered: as `runtime`, for a part that has parameters of these names which its fields leave open.
        runtime: keyword arguments passed as they are, neither merged into the configuration nor copied.
    """
    from hydra.utils import instantiate

    if not isinstance(node, DictConfig):
        node = OmegaConf.create(node) if isinstance(node, dict) else OmegaConf.structured(node)
    part = instantiate(_own_fields(node), _partial_=True, _convert_="all")
    return part(**runtime, **_taken(part, offered or {}))


def field_of(node: Any, name: str, default: Any = None) -> Any:
    """A field of a part's schema, or of a mapping of the user's own."""
    return node.get(name, default) if isinstance(node, dict) else getattr(node, name, default)


def weights_of_parts(node: Any, prefix: str = "") -> dict[str, str]:
    """Where parts of a model start from, by their names in the model: `init_from` of nodes within its node."""
    found = dict[str, str]()
    inside = node if isinstance(node, dict) else {item.name: getattr(node, item.name) for item in fields(node)}
    for key, value in inside.items():
        name = f"{prefix}{key}"
        if is_dataclass(value) or (isinstance(value, dict) and "_target_" in value):
            path = field_of(value, "init_from")
            found |= weights_of_parts(value, f"{name}.") if path is None else {name: str(path)}
    return found


def _own_fields(node: DictConfig) -> DictConfig:
    """A part's configuration without what is for the builder, nor that of the parts that are built inside of it."""
    content = dict[str, Any]()
    for key in map(str, node):
        child = node._get_node(key)
        is_part = isinstance(child, DictConfig) and not child._is_none() and "_target_" in child
        if key not in FOR_THE_BUILDER:
            content[key] = _own_fields(cast(DictConfig, child)) if is_part else child
    return DictConfig(content)


def _taken(part: partial[Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    try:
        names = inspect.signature(part.func).parameters
    except ValueError:  # a compiled function may have none that Python can read
        return {}
    return {name: value for name, value in offered.items() if name in names and name not in part.keywords}
