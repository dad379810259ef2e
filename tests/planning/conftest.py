import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir

from foundry.config.compose import CONFIG_NAME, config_dir, install
from foundry.config.root import to_config


@pytest.fixture(scope="session")
def configure():
    """A typed configuration: `configure(*overrides)`."""
    install()

    def run(*overrides):
        with initialize_config_dir(config_dir(), version_base="1.3"):
            return to_config(hydra_compose(CONFIG_NAME, list(overrides)))

    return run
