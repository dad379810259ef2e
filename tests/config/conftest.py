from collections.abc import Callable

import pytest
from omegaconf import DictConfig
from support import composition


@pytest.fixture(autouse=True)
def kept_choices():
    """Have the compositions of all tests read foundry's own options once."""
    with composition.CHOICES.used():
        yield


@pytest.fixture
def compose() -> Callable[..., DictConfig]:
    """Compose foundry's configuration: `compose(*overrides)`."""
    return composition.compose
