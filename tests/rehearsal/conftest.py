import pytest
from support.rehearsals import Rehearsals

from foundry.rehearsal.guard import reason_not_to_load


@pytest.fixture(scope="session")
def rehearsed(cache):
    """Return `rehearsed(*overrides, world_size=8)`, which rehearses a run and returns its record."""
    if reason := reason_not_to_load():
        pytest.skip(reason)
    rehearsals = Rehearsals(cache)
    yield rehearsals
    rehearsals.close()
