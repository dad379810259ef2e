import pytest
from support import composition


@pytest.fixture(scope="session")
def configure():
    """Return `configure(*overrides)`, which composes a typed config."""
    return composition.configure
