"""One spelling of every `_target_`: foundry's own parts have their public names, whichever path was written.

So two spellings of a run have one configuration, and only it is compared, recorded and trusted.
"""

from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, ListConfig
from omegaconf.errors import OmegaConfBaseException

from foundry.core.part_names import public_name

_TARGET = "_target_"


def respelled(content: Any, spell: Callable[[str], str] = public_name) -> Any:
    """Return plain containers with each `_target_` in them, at any depth, as `spell` gives it."""
    if isinstance(content, dict):
        return {
            key: spell(value) if key == _TARGET and isinstance(value, str) else respelled(value, spell)
            for key, value in content.items()
        }
    return [respelled(value, spell) for value in content] if isinstance(content, list) else content


def use_public_names(composed: DictConfig) -> None:
    """Give each `_target_` in a composed configuration, but for Hydra's own part, its public name."""
    for key in composed:
        if key != "hydra":
            _rename_in(composed, key)


def _rename_in(parent: DictConfig | ListConfig, key: Any) -> None:
    node: Any = parent._get_node(key)
    if isinstance(node, (DictConfig, ListConfig)):
        content = node._content
        if isinstance(content, (dict, list)):  # neither null nor missing nor an interpolation
            for child in range(len(content)) if isinstance(content, list) else list(content):
                _rename_in(node, child)
    elif key == _TARGET and node is not None:
        try:
            path = parent[key]
        except OmegaConfBaseException:  # missing, or an interpolation that leads nowhere, which a check says
            return
        if isinstance(path, str) and (name := public_name(path)) != path:
            parent[key] = name
