from collections.abc import Callable

import pytest
from omegaconf import DictConfig
from support import composition


@pytest.fixture
def compose() -> Callable[..., DictConfig]:
    """Return the function `compose(*overrides)`, which composes foundry's configuration."""
    return composition.compose
