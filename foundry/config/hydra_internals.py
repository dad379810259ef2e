"""Everything of Hydra that is not its documented interface."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.plugin import Plugin
from omegaconf import DictConfig


@contextmanager
def current_config(composed: DictConfig) -> Iterator[None]:
    """Have `${hydra:...}` mean a configuration's own values; `HydraConfig.set_config` would copy it."""
    state = HydraConfig.instance()
    before = state.cfg
    state.cfg = cast(Any, composed)
    try:
        yield
    finally:
        state.cfg = before


def register_plugin(name: str, make: Callable[..., Plugin]) -> None:
    """Have Hydra make a sweeper or launcher of a name with a callable.

    Hydra looks into its plugins' package only, and `Plugins.register` would use the name of the class's own module,
    which Hydra then refuses to instantiate.
    """
    Plugins.instance().class_name_to_class[name] = cast(Any, make)
