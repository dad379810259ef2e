import pytest
from support import composition


@pytest.fixture(autouse=True)
def kept_choices():
    """Have the compositions of all tests read foundry's own options once."""
    with composition.CHOICES.used():
        yield
