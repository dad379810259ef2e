"""Turning a part's configuration into the part."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

FOR_THE_BUILDER = ("init_from",)
"""Fields of a part's configuration that say what happens to the part afterwards, and are not its own."""


def build(node: Any, **runtime: Any) -> Any:
    """Instantiate `node._target_` with its fields, and with what only the running program knows.

    Args:
        node: a mapping or schema with `_target_`.
        runtime: keyword arguments passed as they are, neither merged into the configuration nor copied.
    """
    from hydra.utils import instantiate

    if not isinstance(node, DictConfig):
        node = OmegaConf.create(node) if isinstance(node, dict) else OmegaConf.structured(node)
    node = OmegaConf.masked_copy(node, [str(key) for key in node if key not in FOR_THE_BUILDER])
    return instantiate(node, _partial_=True, _convert_="all")(**runtime)
