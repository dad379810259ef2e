"""Proposals of a search depend only on the trials that they saw, and are the proposals of Optuna's samplers."""

import random
import shutil
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundry.config.schemas.sweeper import Wait
from foundry.run_dir.study_storage import open_storage

optuna = pytest.importorskip("optuna", reason="needs the extra search")
from foundry.sweeps.search.proposals import VIEW, Proposer, View  # noqa: E402 - which imports it
from foundry.sweeps.search.study import SearchStudy  # noqa: E402

TrialState = optuna.trial.TrialState
DISTRIBUTIONS = {
    "lr": optuna.distributions.FloatDistribution(1e-4, 1e-1, log=True),
    "layers": optuna.distributions.IntDistribution(1, 8),
    "optimizer": optuna.distributions.CategoricalDistribution(["adamw", "muon", "sgd"]),
}
TPE = {"_target_": "optuna.samplers.TPESampler", "seed": 3, "n_startup_trials": 4}
SAMPLERS = {
    "tpe": TPE,
    "tpe without running trials": TPE | {"constant_liar": False},
    "multivariate tpe": TPE | {"multivariate": True},
    "random": {"_target_": "optuna.samplers.RandomSampler", "seed": 0},
    "quasi-random": {"_target_": "optuna.samplers.QMCSampler", "seed": 0},
    "genetic": {"_target_": "optuna.samplers.NSGAIISampler", "seed": 0, "population_size": 4},
}


@pytest.fixture(autouse=True)
def quiet():
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def create(storage=None):
    storage = storage or optuna.storages.InMemoryStorage()
    return SearchStudy.create(storage, "search", "minimize", {"direction": "minimize"}, Wait.none)


def finish(study, trial):
    """End a trial with an outcome that depends only on its values: some fail and some are pruned."""
    loss = trial.params["lr"] * trial.params["layers"] + len(trial.params["optimizer"])
    if trial.params["layers"] == 8:
        study.tell(trial.number, state=TrialState.FAIL)
    elif trial.params["optimizer"] == "sgd":
        study.tell(trial.number, state=TrialState.PRUNED)
    else:
        study.tell(trial.number, loss)


def run(study, proposer, *, places, num_trials, seed):
    """Run a search without batches whose trials end in a random order."""
    choose, running = random.Random(seed), []
    for _ in range(num_trials):
        if len(running) == places:
            for _ in range(choose.randint(1, places)):
                number = running.pop(choose.randrange(len(running)))
                finish(study, study.trials()[number])
        running.append(study.add_trial())
        study.complete(running[-1], proposer)
    return [trial.params for trial in study.trials()]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_proposals_equal_those_of_optuna_for_the_same_trials(sampler):
    """Batches of three: Optuna's `ask` sees the whole study, and so does each proposal."""
    study = create()
    proposer = Proposer(SAMPLERS[sampler], "minimize", DISTRIBUTIONS)
    plain = optuna.create_study(direction="minimize")
    for first in range(0, 18, 3):
        for number in range(first, first + 3):
            assert study.add_trial() == number
            study.complete(number, proposer)
            plain.sampler = proposer.build(number)
            plain.ask(DISTRIBUTIONS)
        for number in range(first, first + 3):
            finish(study, study.trials()[number])
            finish(plain, plain.trials[number])
    assert [trial.params for trial in study.trials()] == [trial.params for trial in plain.trials]
    assert len({str(trial.params) for trial in plain.trials}) > 6


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_replay_from_the_recorded_views_proposes_the_same_values(sampler):
    study = create()
    proposer = Proposer(SAMPLERS[sampler], "minimize", DISTRIBUTIONS)
    proposed = run(study, proposer, places=3, num_trials=16, seed=1)
    assert [proposer.replay(number, study.trials()).params for number in range(16)] == proposed


def test_proposal_does_not_depend_on_trials_outside_of_its_view():
    study = create()
    proposer = Proposer(TPE, "minimize", DISTRIBUTIONS)
    run(study, proposer, places=4, num_trials=12, seed=0)
    trials = study.trials()
    view = View.recorded(trials[11].user_attrs[VIEW])
    assert len(view.running) == 3
    assert view.ended == frozenset(range(11)) - view.running
    fewer = View(ended=frozenset(sorted(view.ended)[:5]), running=view.running)
    assert proposer.propose(11, trials, fewer).params != trials[11].params
    unseen = [optuna.trial.create_trial(state=TrialState.FAIL) for _ in range(4)]
    for number, trial in enumerate(unseen, start=11):
        trial.number = number
    assert proposer.propose(11, [*trials[:11], *unseen], view).params == trials[11].params


@pytest.mark.parametrize("writes", range(6))
def test_trial_of_a_process_killed_while_it_records_a_proposal_gets_the_same_values(writes, tmp_path, monkeypatch):
    (tmp_path / "undisturbed").mkdir()
    storage = open_storage(tmp_path / "optuna.jsonl")
    study, proposer = create(storage), Proposer(TPE, "minimize", DISTRIBUTIONS)
    run(study, proposer, places=2, num_trials=7, seed=5)
    shutil.copy(tmp_path / "optuna.jsonl", tmp_path / "undisturbed")
    undisturbed = create(open_storage(tmp_path / "undisturbed" / "optuna.jsonl"))
    undisturbed.complete(undisturbed.add_trial(), proposer)
    append, left = storage._backend.append_logs, iter(range(writes))

    def append_some(logs):
        if next(left, None) is None:
            raise KeyboardInterrupt
        append(logs)

    monkeypatch.setattr(storage._backend, "append_logs", append_some)
    # Optuna 4 writes a proposal in five parts, Optuna 5 in six.
    with pytest.raises(KeyboardInterrupt) if writes < 5 else suppress(KeyboardInterrupt):
        study.complete(study.add_trial(), proposer)
    again = SearchStudy.find(open_storage(tmp_path / "optuna.jsonl"), "search")
    if writes == 0:
        again.add_trial()
    again.complete(7, proposer)
    assert [trial.params for trial in again.trials()] == [trial.params for trial in undisturbed.trials()]
    assert len(again.trials()) == 8


@settings(max_examples=50, deadline=None, derandomize=True)
@given(ended=st.frozensets(st.integers(0, 40)), running=st.frozensets(st.integers(0, 40)))
def test_recorded_view_is_the_same_view(ended, running):
    view = View(ended=ended, running=running - ended)
    assert View.recorded(view.as_recorded()) == view


def test_recorded_view_of_a_long_search_is_short():
    view = View(ended=frozenset(range(100_000)) - {99_997, 99_999}, running=frozenset({99_997}))
    assert view.as_recorded() == {"ended": "0-99996,99998", "running": "99997"}
