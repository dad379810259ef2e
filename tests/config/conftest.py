from collections.abc import Callable

import composition
import pytest
from omegaconf import DictConfig


@pytest.fixture
def compose() -> Callable[..., DictConfig]:
    """Compose foundry's configuration: `compose(*overrides)`."""
    return composition.compose
