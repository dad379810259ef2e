"""The loop of a search with simulated jobs: order of proposals, interruptions, failures and equal proposals."""

import json
import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundry.config.schemas.sweeper import Search, Wait
from foundry.core.errors import ConfigError, Violation
from foundry.run_dir.status import write_status
from foundry.run_dir.study_storage import open_storage

optuna = pytest.importorskip("optuna", reason="needs the extra search")
from foundry.sweeps.search.commands import Commands  # noqa: E402 - which imports it
from foundry.sweeps.search.loop import SearchLoop  # noqa: E402
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


def test_interrupted_trials_do_not_start_after_max_failures_either(tmp_path):
    storage, sweeper = optuna.storages.InMemoryStorage(), Sweeper(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(sweeper, create(storage), Queue(sweeper, 3, [9, 9, 9], interrupt_at=5), n_trials=3, n_jobs=3)
    queue = Queue(sweeper, 1, [1, 1, 1], states={0: "failed"})
    run(sweeper, create(storage), queue, n_trials=3, max_failures=1)
    assert list(queue.ends) == [0]
    assert [trial.state for trial in create(storage).trials()] == [TrialState.FAIL, *[TrialState.RUNNING] * 2]


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


def share(storage, command, takeover_seconds=0.0):
    """Return the study as one of several commands sees it; heartbeats are sent only when it begins."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    commands = Commands(storage, "search", command, takeover_seconds=takeover_seconds)
    return SearchStudy.create(storage, "search", "minimize", {"direction": "minimize"}, Wait.none, commands)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr("foundry.sweeps.search.loop._OTHERS_SECONDS", 0.001)


def test_commands_that_share_a_study_run_each_trial_once(tmp_path):
    """Four commands at the same time, each with its own sweep directory and places."""
    location, loops, errors = f"sqlite:///{tmp_path}/study.db", {}, []
    share(open_storage(location), "creator")

    def search(name):
        try:
            (tmp_path / name).mkdir()
            sweeper = Sweeper(tmp_path / name)
            loops[name] = run(
                sweeper,
                share(open_storage(location), name, takeover_seconds=600),
                Queue(sweeper, 2, range(1, 99)),
                n_trials=17,
                n_jobs=2,
            )
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=search, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == []
    trials = [trial for trial in share(open_storage(location), "reader").trials() if trial.params]
    assert [trial.number for trial in trials] == list(range(17))
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
    assert sum(len(loop.jobs) for loop in loops.values()) == 17
    for trial in trials:
        assert trial.user_attrs["run_dir"].startswith(str(tmp_path / trial.user_attrs["command"]))


def test_command_takes_over_the_trials_of_a_command_that_is_gone(tmp_path):
    storage = optuna.storages.InMemoryStorage()
    for name in "ab":
        (tmp_path / name).mkdir()
    gone, taker = Sweeper(tmp_path / "a"), Sweeper(tmp_path / "b")
    with pytest.raises(KeyboardInterrupt):
        run(gone, share(storage, "a"), Queue(gone, 2, [5, 9, 9, 9], interrupt_at=6), n_trials=6, n_jobs=2)
    run_dir = tmp_path / "a" / "1"
    run_dir.mkdir()
    write_status(run_dir, state="stopped", config_hash="")
    (run_dir / "progress.txt").write_text("half")
    queue = Queue(taker, 2, [1, 1, 1, 1, 1, 1])
    run(taker, share(storage, "b"), queue, n_trials=6, n_jobs=2)
    trials = share(storage, "reader").trials()
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 6
    assert len(queue.ends) == 5
    continued = [path.parent.name for path in (tmp_path / "b").glob("*/progress.txt")]
    assert len(continued) == 1
    assert trials[1].user_attrs["run_dir"] == str(tmp_path / "b" / continued[0])
    assert (run_dir / "progress.txt").read_text() == "half"


def test_commands_do_not_wait_for_stopped_jobs_of_each_other(tmp_path):
    storage = optuna.storages.InMemoryStorage()
    sweeper = Sweeper(tmp_path)
    loop = run(sweeper, share(storage, "a"), Queue(sweeper, 1, [1, 1], states={0: "stopped"}), n_trials=2)
    assert len(loop.jobs) == 2
    assert not share(storage, "b", takeover_seconds=600).awaits_others(2)


def test_search_ends_on_a_signal_while_the_storage_does_not_respond(tmp_path, monkeypatch):
    storage, sweeper = optuna.storages.InMemoryStorage(), Sweeper(tmp_path)
    queue, study = Queue(sweeper, 1, [1, 1]), share(storage, "a")
    next_ended = queue.next_ended

    def respond():
        if queue.interrupted:
            raise KeyboardInterrupt
        ended = next_ended()
        queue.interrupted = True

        def fail(*arguments, **options):
            raise OSError("no route to host")

        monkeypatch.setattr(storage, "set_trial_state_values", fail)
        return ended

    monkeypatch.setattr(queue, "next_ended", respond)
    with pytest.raises(KeyboardInterrupt):
        run(sweeper, study, queue, n_trials=2)
    monkeypatch.undo()
    run(sweeper, share(storage, "a"), Queue(sweeper, 1, [1, 1]), n_trials=2)
    assert [trial.state for trial in study.trials()] == [TrialState.COMPLETE] * 2
