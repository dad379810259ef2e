import composition
import pytest


@pytest.fixture(scope="session")
def configure():
    """A typed configuration: `configure(*overrides)`."""
    return composition.configure
