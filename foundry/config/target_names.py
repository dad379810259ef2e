"""Replacement of older paths by public names in every `_target_`.

Composed and recorded configurations then have the same spelling, which simplifies comparisons.
"""

from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, ListConfig
from omegaconf.errors import OmegaConfBaseException

from foundry.core.part_names import public_name

_TARGET = "_target_"


def respelled(content: Any, spell: Callable[[str], str] = public_name) -> Any:
    """Return plain containers with `spell` applied to each `_target_` at any depth."""
    if isinstance(content, dict):
        return {
            key: spell(value) if key == _TARGET and isinstance(value, str) else respelled(value, spell)
            for key, value in content.items()
        }
    return [respelled(value, spell) for value in content] if isinstance(content, list) else content


def use_public_names(composed: DictConfig) -> None:
    """Replace older paths by public names in each `_target_` of a configuration, except in the `hydra` node."""
    for key in composed:
        if key != "hydra":
            _rename_in(composed, key)


def _rename_in(parent: DictConfig | ListConfig, key: Any) -> None:
    node: Any = parent._get_node(key)
    if isinstance(node, (DictConfig, ListConfig)):
        content = node._content
        if isinstance(content, (dict, list)):  # otherwise a string or None: null, missing or an interpolation
            for child in range(len(content)) if isinstance(content, list) else list(content):
                _rename_in(node, child)
    elif key == _TARGET and node is not None:
        try:
            path = parent[key]
        except OmegaConfBaseException:  # a missing value or a broken interpolation: checks report both
            return
        if isinstance(path, str) and (name := public_name(path)) != path:
            parent[key] = name
