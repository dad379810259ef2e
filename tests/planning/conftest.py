import pytest
from support import composition


@pytest.fixture(scope="session")
def configure():
    """A typed configuration: `configure(*overrides)`."""
    return composition.configure
