"""The queue of a search for launchers of other packages."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("optuna", reason="needs the extra search")
from foundry.sweeps.search.blocking_queue import BlockingQueue


class Launcher:
    """Numbers the jobs of a call from the first, as launchers of Hydra do."""

    def __init__(self):
        self.launched = []

    def launch(self, job_overrides, initial_job_idx):
        self.launched += list(enumerate(job_overrides, initial_job_idx))


@given(indices=st.lists(st.integers(0, 9), unique=True))
def test_each_job_runs_once_with_its_own_number(indices):
    """A search runs a job again after its promotion, together with new jobs."""
    jobs = [SimpleNamespace(index=index, overrides=(f"key={index}",)) for index in indices]
    launcher = Launcher()
    queue = BlockingQueue(launcher, limit=10)
    queue.add(jobs)
    assert queue.free == 10 - len(jobs)
    assert queue.next_ended() == jobs
    assert launcher.launched == [(index, (f"key={index}",)) for index in indices]
    assert queue.next_ended() == []
