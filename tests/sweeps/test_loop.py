"""The loop of a search with simulated jobs: order of proposals, interruptions, failures and equal proposals."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundry.config.schemas.sweeper import Search, Wait
from foundry.core.errors import ConfigError, Violation
from foundry.run_dir.status import write_status

optuna = pytest.importorskip("optuna", reason="needs the extra search")
from foundry.sweeps.search.loop import SearchLoop  # noqa: E402 - which imports it
from foundry.sweeps.search.proposals import Proposer  # noqa: E402
from foundry.sweeps.search.search_space import Dimension, Space  # noqa: E402
from foundry.sweeps.search.study import SearchStudy  # noqa: E402

TrialState = optuna.trial.TrialState
REAL = optuna.distributions.FloatDistribution(0.0, 1.0)
RANDOM = {"_target_": "optuna.samplers.RandomSampler", "seed": 0}


class Sweeper:
    """Prepares and records jobs like a sweeper, without composing them."""

    def __init__(self, sweep_dir):
        self.sweep_dir, self.jobs = sweep_dir, {}

    def prepare(self, jobs, manifest):
        (job,) = jobs
        if "key=invalid" in job.swept:
            raise ConfigError(Violation("key", "is invalid"))
        known = self.jobs.setdefault(job.swept, replace(job, index=len(self.jobs), dir=str(len(self.jobs))))
        return [known]

    def record(self, manifest, jobs):
        return manifest

    def composed(self, job):
        return job

    def run_dir(self, job):
        return self.sweep_dir / job.dir

    def state(self, job):
        path = self.run_dir(job) / "status.json"
        return json.loads(path.read_text())["state"] if path.is_file() else None


class Queue:
    """Places of jobs that run for simulated seconds.

    Args:
        sweeper: knows the run directories.
        places: number of jobs at a time.
        durations: seconds of each job.
        states: last states of jobs other than "finished".
        interrupt_at: time of an interruption.
    """

    def __init__(self, sweeper, places, durations, states=None, interrupt_at=float("inf")):
        self.sweeper, self.places, self.durations, self.states = sweeper, places, durations, states or {}
        self.interrupt_at = interrupt_at
        self.now, self.active, self.begins, self.ends = 0.0, {}, {}, {}

    interrupted = False

    @property
    def free(self):
        return self.places - len(self.active)

    def add(self, jobs):
        for job in jobs:
            assert self.free > 0
            assert job.index not in self.begins
            self.begins[job.index] = self.now
            self.active[job.index] = job

    def next_ended(self):
        if not self.active:
            return []
        self.now, index = min((self.begins[index] + self.durations[index], index) for index in self.active)
        if self.now > self.interrupt_at:
            raise KeyboardInterrupt
        job = self.active.pop(index)
        self.ends[index] = self.now
        run_dir = self.sweeper.run_dir(job)
        run_dir.mkdir(exist_ok=True)
        (run_dir / "result.json").write_text(json.dumps({"val_loss": len(job.swept[0]) + index / 100}))
        write_status(run_dir, state=self.states.get(index, "finished"))
        return [job]


def create(storage=None, wait=Wait.none):
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = storage or optuna.storages.InMemoryStorage()
    return SearchStudy.create(storage, "search", "minimize", {"direction": "minimize"}, wait)


def run(sweeper, study, queue, distribution=REAL, **options):
    """Run the loop of a search over one key; return the loop."""
    space = Space((), (Dimension("key", distribution),))
    search = Search(metric="val_loss", direction="minimize", sampler=RANDOM, **options)
    loop = SearchLoop(sweeper, search, study, space, Proposer(RANDOM, "minimize", space.distributions), None)
    loop.run(queue)
    return loop


@settings(max_examples=20, deadline=None, derandomize=True)
@given(durations=st.lists(st.integers(1, 20), min_size=1, max_size=9), places=st.integers(1, 4))
def test_free_place_gets_the_next_proposal_at_once(durations, places, tmp_path_factory):
    sweeper, study = Sweeper(tmp_path_factory.mktemp("sweep")), create()
    queue = Queue(sweeper, places, durations)
    run(sweeper, study, queue, n_trials=len(durations), n_jobs=places)
    free_at = [0] * places
    for number, duration in enumerate(durations):
        begin = min(free_at)
        assert queue.begins[number] == begin
        free_at[free_at.index(begin)] = begin + duration
    assert [trial.state for trial in study.trials()] == [TrialState.COMPLETE] * len(durations)


def test_batch_begins_when_no_job_of_the_last_batch_is_left(tmp_path):
    sweeper, study = Sweeper(tmp_path), create(wait=Wait.batch)
    queue = Queue(sweeper, 2, [5, 1, 2, 7, 3])
    run(sweeper, study, queue, n_trials=5, n_jobs=2)
    assert list(queue.begins.values()) == [0, 0, 5, 5, 12]


@pytest.mark.parametrize("wait", list(Wait))
def test_interrupted_search_runs_each_trial_once(wait, tmp_path):
    storage = optuna.storages.InMemoryStorage()
    sweeper = Sweeper(tmp_path)
    durations, ends = [9, 2, 4, 4, 3, 8, 1, 6, 2], {}
    for interrupt_at in (5, 6, 3, float("inf")):
        queue = Queue(sweeper, 3, durations, interrupt_at=interrupt_at)
        try:
            run(sweeper, create(storage, wait), queue, n_trials=9, n_jobs=3)
        except KeyboardInterrupt:
            assert interrupt_at < float("inf")
        assert not ends.keys() & queue.ends.keys()
        ends |= queue.ends
    assert sorted(ends) == list(range(9))
    trials = create(storage, wait).trials()
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 9
    assert len({trial.params["key"] for trial in trials}) == 9


@pytest.mark.parametrize("wait", list(Wait))
def test_search_starts_no_trial_after_max_failures(wait, tmp_path, capsys):
    """The running jobs continue."""
    sweeper, study = Sweeper(tmp_path), create(wait=wait)
    queue = Queue(sweeper, 2, [2, 9, 2, 2, 2, 2], states={0: "failed", 2: "failed", 3: "failed"})
    loop = run(sweeper, study, queue, n_trials=6, n_jobs=2, max_failures=2)
    assert loop.failures == (2 if wait is Wait.none else 3)
    expected = {Wait.none: {0: 2, 2: 4, 1: 9}, Wait.batch: {0: 2, 1: 9, 2: 11, 3: 11}}
    assert queue.ends == expected[wait]
    message = f"the search ends: {loop.failures} jobs have failed (hydra.sweeper.max_failures)\n"
    assert capsys.readouterr().err == message


def test_equal_proposals_share_a_job(tmp_path):
    choices = optuna.distributions.CategoricalDistribution(["a", "b"])
    sweeper, study = Sweeper(tmp_path), create()
    queue = Queue(sweeper, 3, [3, 4])
    run(sweeper, study, queue, choices, n_trials=8, n_jobs=3)
    assert len(queue.ends) == 2
    values = {"a": set(), "b": set()}
    for trial in study.trials():
        values[trial.params["key"]].add(trial.value)
    assert len(values["a"]) == len(values["b"]) == 1


def test_invalid_proposal_fails_without_a_job(tmp_path, capsys):
    choices = optuna.distributions.CategoricalDistribution(["valid", "invalid"])
    sweeper, study = Sweeper(tmp_path), create()
    loop = run(sweeper, study, Queue(sweeper, 1, [3]), choices, n_trials=6, max_failures=None)
    invalid = [trial for trial in study.trials() if trial.params["key"] == "invalid"]
    assert loop.failures == len(invalid) > 0
    assert {trial.state for trial in invalid} == {TrialState.FAIL}
    assert capsys.readouterr().err == "key=invalid is skipped: is invalid\n" * len(invalid)


def test_stopped_job_continues_at_the_next_start_only(tmp_path):
    storage, sweeper = optuna.storages.InMemoryStorage(), Sweeper(tmp_path)
    first = Queue(sweeper, 1, [1, 1, 1], states={1: "stopped"})
    run(sweeper, create(storage), first, n_trials=3)
    assert list(first.ends) == [0, 1, 2]
    second = Queue(sweeper, 1, [1, 1, 1])
    run(sweeper, create(storage), second, n_trials=3)
    assert list(second.ends) == [1]
    assert [trial.state for trial in create(storage).trials()] == [TrialState.COMPLETE] * 3
