import pytest
from support import composition


@pytest.fixture(autouse=True)
def kept_choices():
    """Cache the config options of foundry for the compositions of all tests."""
    with composition.CHOICES.used():
        yield
