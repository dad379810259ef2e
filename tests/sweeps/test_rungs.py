"""Searches with successive halving and simulated runs: pauses, promotions, interruptions, failures, equal proposals."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from foundry.config.schemas.evaluation import Direction
from foundry.config.schemas.sweeper import Search, Wait
from foundry.run_dir.rung import Rung
from foundry.run_dir.status import write_status

optuna = pytest.importorskip("optuna", reason="needs the extra search")
from foundry.sweeps.manifest import SweepManifest  # noqa: E402 - imported after the check for Optuna
from foundry.sweeps.search.loop import SearchLoop  # noqa: E402
from foundry.sweeps.search.proposals import Proposer  # noqa: E402
from foundry.sweeps.search.search_space import Dimension, Space  # noqa: E402
from foundry.sweeps.search.study import SearchStudy  # noqa: E402

TrialState = optuna.trial.TrialState
REAL = optuna.distributions.FloatDistribution(0.0, 1.0)
FEW = optuna.distributions.CategoricalDistribution([0.1, 0.4, 0.7])
SAMPLERS = {
    "random": {"_target_": "optuna.samplers.RandomSampler", "seed": 0},
    "tpe": {"_target_": "optuna.samplers.TPESampler", "seed": 0, "n_startup_trials": 3},
}
ASHA = {"_target_": "hydra_plugins.foundry.ASHA", "min_resource": "3", "reduction_factor": 3}
TOTAL = 27
"""Steps of a run: it has the rungs 3 and 9."""


class Sweeper:
    """Prepares and records jobs like a sweeper, without composing them."""

    def __init__(self, sweep_dir):
        self.sweep_dir = sweep_dir

    def prepare(self, jobs, manifest):
        (job,) = jobs
        (index,) = manifest.number(jobs)
        return [replace(job, index=index, dir=str(index))]

    def record(self, manifest, jobs):
        for job in jobs:
            self.run_dir(job).mkdir(exist_ok=True)
        manifest = manifest.with_jobs(jobs)
        manifest.save(self.sweep_dir)
        return manifest

    def composed(self, job):
        return job

    def run_dir(self, job):
        return self.sweep_dir / job.dir

    def state(self, job):
        path = self.run_dir(job) / "status.json"
        return json.loads(path.read_text())["state"] if path.is_file() else None


class Machine:
    """Queue of jobs that train one after the other, or interleaved; it is interrupted after a number of ends.

    Attributes:
        steps: steps that each run has trained, by index.
    """

    def __init__(self, sweeper, places=1, ends=None, failing=()):
        self.sweeper, self.places, self.ends, self.failing = sweeper, places, ends, failing
        self.active, self.steps, self.interrupted = [], {}, False

    @property
    def free(self):
        return self.places - len(self.active)

    def add(self, jobs):
        for job in jobs:
            assert self.free > 0
            assert job.index not in [other.index for other in self.active]
            self.active.append(job)

    def next_ended(self):
        if not self.active:
            return []
        if self.ends is not None:
            if self.ends == 0:
                raise KeyboardInterrupt
            self.ends -= 1
        job = self.active.pop(0)
        self.train(self.sweeper.run_dir(job), job)
        return [job]

    def train(self, run_dir, job):
        key = float(job.swept[0].partition("=")[2])
        rung = Rung.load(run_dir)
        end = TOTAL if rung.at is None else min(int(rung.at.removesuffix(" steps")), TOTAL)
        file = run_dir / "steps"
        before = int(file.read_text()) if file.is_file() else 0
        is_repeated = self.sweeper.state(job) == "failed"  # by an equal proposal
        assert before < end or is_repeated  # a run is not started again without a new rung
        if job.index in self.failing and end > 3:
            write_status(run_dir, state="failed", reason="failed")
            return
        file.write_text(str(end))
        # The order of the runs changes between rungs.
        result = {"val_loss": abs(key - 0.3) + (7 * key * end % 1) / end}
        is_over = end == TOTAL
        (run_dir / "result.json").write_text(json.dumps(result if is_over else {**result, "rung": rung.number}))
        write_status(run_dir, state="finished" if is_over else "paused", reason="at a rung")


def search(sweep_dir, storage, machine=None, distribution=REAL, sampler="random", **options):
    """Run a search to its end, or until the machine is interrupted; return its study, loop and proposer."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sweeper = Sweeper(sweep_dir)
    machine = machine or Machine(sweeper)
    machine.sweeper = sweeper
    settings = {"n_trials": 9, "n_jobs": machine.places, "max_failures": None, **options}
    node = Search(metric="val_loss", direction=Direction.minimize, sampler=SAMPLERS[sampler], pruner=ASHA, **settings)
    study = SearchStudy.create(storage, "search", "minimize", {"direction": "minimize"}, Wait.none)
    space = Space((), (Dimension("key", distribution),))
    proposer = Proposer(SAMPLERS[sampler], "minimize", space.distributions)
    manifest = SweepManifest.begin(sweep_dir, (), launcher="local", metric="val_loss", direction="minimize")
    loop = SearchLoop(sweeper, node, study, space, proposer, manifest)
    try:
        loop.run(machine)
    except KeyboardInterrupt:
        machine.interrupted = True
    return study, loop, proposer


def outcome(study):
    """Return the trials without times."""
    return [(t.state, t.params, t.values, t.intermediate_values, t.user_attrs) for t in study.trials()]


def check_promotions(trials, factor=3):
    """Check that all trials have ended, that the best of each rung continued, and the values of pruned trials."""
    assert {trial.state for trial in trials} <= {TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL}
    for rung in (1, 2):
        reached = [trial for trial in trials if rung in trial.intermediate_values]
        reached.sort(key=lambda trial: (trial.intermediate_values[rung], trial.number))
        for trial in reached[: len(reached) // factor]:
            assert rung + 1 in trial.intermediate_values or trial.state is not TrialState.PRUNED
    for trial in trials:
        if trial.state is TrialState.PRUNED:
            assert trial.value == trial.intermediate_values[max(trial.intermediate_values)]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_interrupted_search_continues_as_if_it_had_not_been_interrupted(sampler, tmp_path_factory):
    @settings(max_examples=examples(25), deadline=None, derandomize=True)
    @given(st.lists(st.integers(0, 6), max_size=5))
    def check(ends):
        storage, folder = optuna.storages.InMemoryStorage(), tmp_path_factory.mktemp("sweep")
        for number in ends:
            search(folder, storage, Machine(None, ends=number), sampler=sampler)
        study, _, _ = search(folder, storage, sampler=sampler)
        assert outcome(study) == expected

    study, _, proposer = search(tmp_path_factory.mktemp("whole"), optuna.storages.InMemoryStorage(), sampler=sampler)
    expected, trials = outcome(study), study.trials()
    check_promotions(trials)
    assert [trial.state for trial in trials].count(TrialState.COMPLETE) >= 1
    assert [proposer.replay(trial.number, trials).params for trial in trials] == [trial.params for trial in trials]
    check()


@settings(max_examples=examples(25), deadline=None, derandomize=True)
@given(places=st.integers(2, 5), failing=st.sets(st.integers(0, 11)), distribution=st.sampled_from([REAL, FEW]))
def test_parallel_search_ends_each_trial_and_promotes_the_best(places, failing, distribution, tmp_path_factory):
    """Some runs fail after their first rung, and equal proposals share a run."""
    machine = Machine(None, places, failing=failing)
    folder = tmp_path_factory.mktemp("sweep")
    study, _, _ = search(folder, optuna.storages.InMemoryStorage(), machine, distribution, n_trials=12)
    assert len(study.trials()) == 12
    check_promotions(study.trials())
    for file in folder.glob("*/steps"):
        result = json.loads((file.parent / "result.json").read_text())
        assert ("pruned" in result) <= (file.read_text() != str(TOTAL))


def test_samplers_see_the_values_of_paused_trials(tmp_path):
    study, _, proposer = search(tmp_path, optuna.storages.InMemoryStorage(), sampler="tpe")
    trials = study.trials()
    for trial in trials[4:]:
        assert trial.user_attrs["saw"]["rungs"]
    unknown = [replace_view(trial) for trial in trials]
    assert proposer.replay(8, unknown).params != trials[8].params


def replace_view(trial):
    """Return a copy of a trial whose proposal saw no rungs."""
    view = {name: value for name, value in trial.user_attrs["saw"].items() if name != "rungs"}
    return optuna.trial.create_trial(
        state=trial.state,
        value=trial.value,
        params=trial.params,
        distributions=trial.distributions,
        user_attrs=trial.user_attrs | {"saw": view},
        intermediate_values=trial.intermediate_values,
    )


def test_paused_runs_of_an_ended_search_are_finished_and_pruned(tmp_path):
    study, _, _ = search(tmp_path, optuna.storages.InMemoryStorage())
    pruned = [trial.number for trial in study.trials() if trial.state is TrialState.PRUNED]
    assert pruned
    for number in pruned:
        status, result = (json.loads((tmp_path / str(number) / name).read_text()) for name in FILES)
        assert (status["state"], result["status"]) == ("finished", "finished")
        assert status["reason"] == result["pruned"] == "pruned: at a rung is not among the best 1/3 of its rung"


FILES = ("status.json", "result.json")


def test_search_that_ends_by_failures_keeps_its_paused_trials(tmp_path):
    machine = Machine(None, failing=range(9))
    study, loop, _ = search(tmp_path, storage := optuna.storages.InMemoryStorage(), machine, max_failures=1)
    states = [trial.state for trial in study.trials()]
    assert loop.failures == 1
    assert states.count(TrialState.RUNNING) == len(states) - 1 > 0
    study, _, _ = search(tmp_path, storage)
    check_promotions(study.trials())


def test_extended_search_promotes_among_all_results(tmp_path):
    storage = optuna.storages.InMemoryStorage()
    first, _, _ = search(tmp_path, storage)
    ended = outcome(first)
    study, _, _ = search(tmp_path, storage, n_trials=27)
    assert outcome(study)[:9] == ended
    assert len(study.trials()) == 27
    assert {trial.state for trial in study.trials()} == {TrialState.COMPLETE, TrialState.PRUNED}
