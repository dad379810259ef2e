import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from support.run_events import empty_database, events, no_mlflow_of_the_user, with_database  # noqa: F401 # fixtures

from foundry.config.composition.compose import CONFIG_NAME, config_dir, install
from foundry.config.composition.hydra_internals import load_unchecked
from foundry.config.composition.hydra_versions import VERSION_BASE


@pytest.fixture
def option_reads(monkeypatch):
    """A list that grows by one for each read of conf/, that is, for each choice of options that is composed."""
    reads = []

    def load(*arguments):
        reads.append(arguments)
        return load_unchecked(*arguments)

    monkeypatch.setattr("foundry.sweeps.compose_jobs.load_unchecked", load)
    return reads


@pytest.fixture
def sweep():
    """Hydra's loader, and a function that composes a sweep's own configuration."""
    install()
    with initialize_config_dir(config_dir(), **VERSION_BASE):
        loader = GlobalHydra.instance().config_loader()
        yield loader, lambda *words: loader.load_configuration(CONFIG_NAME, list(words), RunMode.MULTIRUN)
