from collections.abc import Callable

import pytest
from omegaconf import DictConfig
from support import composition


@pytest.fixture
def compose() -> Callable[..., DictConfig]:
    """Compose foundry's configuration: `compose(*overrides)`."""
    return composition.compose
