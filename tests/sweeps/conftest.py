import pytest
from support.run_events import empty_database, events, no_mlflow_of_the_user, with_database  # noqa: F401 # fixtures

from foundry.config.composition.hydra_internals import load_unchecked


@pytest.fixture
def option_reads(monkeypatch):
    """What composing jobs reads of conf/: a list that grows by one for each choice of options that is composed."""
    reads = []

    def load(*arguments):
        reads.append(arguments)
        return load_unchecked(*arguments)

    monkeypatch.setattr("foundry.sweeps.compose_jobs.load_unchecked", load)
    return reads
