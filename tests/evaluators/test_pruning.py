"""Values that a trial reports to its search, and its pruning decisions."""

import math

import pytest
import torch

from foundry.evaluators.pruning import Pruning
from foundry.parallel.process_group import World
from foundry.run_dir.study_storage import open_storage
from foundry.run_dir.trial import TrialLink

optuna = pytest.importorskip("optuna", reason="needs the extra search")
ALONE = World.single(torch.device("cpu"))
MEDIAN = {"_target_": "optuna.pruners.MedianPruner", "n_startup_trials": 1, "n_warmup_steps": 250}


@pytest.fixture
def trial(tmp_path):
    """Create a study with one finished and one running trial."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(study_name="s", storage=open_storage(tmp_path / "optuna.jsonl"), direction="minimize")
    finished = study.ask()
    for step, value in ((250, 0.9), (500, 0.8)):
        finished.report(value, step)
    study.tell(finished, 0.7)
    number = study.ask().number
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    TrialLink(journal="../optuna.jsonl", study="s", number=number, metric="val_loss", pruner=MEDIAN).save(run_dir)
    return run_dir, lambda: study.trials[number].intermediate_values


def test_run_outside_a_search_has_no_pruning(tmp_path):
    assert Pruning.of(tmp_path, ALONE) is None


def test_worse_trial_is_pruned_with_the_reason(trial):
    run_dir, reported = trial
    pruning = Pruning.of(run_dir, ALONE)
    assert pruning.update({"val_loss": 0.95, "val_other": 0.0}, 0, 0.2) is None  # Within the warmup of the pruner.
    assert pruning.update({"val_loss": 0.85}, 0, 0.25) is None
    assert pruning.reason is None
    message = "pruned: val_loss 0.85 at 50% of the run is worse than other trials"
    assert pruning.update({"val_loss": 0.85}, 0, 0.5) == pruning.reason == message
    assert reported() == {200: 0.95, 250: 0.85, 500: 0.85}


def test_repeated_evaluation_is_reported_once(trial):
    run_dir, reported = trial
    assert Pruning.of(run_dir, ALONE).update({"val_loss": 0.85}, 0, 0.25) is None
    assert Pruning.of(run_dir, ALONE).update({"val_loss": 0.86}, 0, 0.25) is None
    assert reported() == {250: 0.85}


def test_trial_with_a_nan_metric_is_pruned(trial):
    run_dir, _ = trial
    assert "val_loss nan at 50%" in Pruning.of(run_dir, ALONE).update({"val_loss": math.nan}, 0, 0.5)


def test_unreadable_study_does_not_prune(trial, caplog):
    run_dir, _ = trial
    pruning = Pruning.of(run_dir, ALONE)
    journal = run_dir.parent / "optuna.jsonl"
    journal.unlink()
    journal.mkdir()
    assert pruning.update({"val_loss": 9.0}, 0, 0.5) is None
    assert "cannot read whether the search prunes this run" in caplog.text


@pytest.fixture
def shared_trial(trial, monkeypatch):
    """A trial whose study is shared, with its location in the environment."""
    run_dir, reported = trial
    link = TrialLink.load(run_dir)
    TrialLink(**{**vars(link), "journal": "shared"}).save(run_dir)
    monkeypatch.setenv("FOUNDRY_STUDY_STORAGE", str(run_dir.parent / "optuna.jsonl"))
    return run_dir, reported


def test_trial_of_a_shared_study_is_pruned(shared_trial):
    run_dir, reported = shared_trial
    assert "val_loss 0.85 at 50%" in Pruning.of(run_dir, ALONE).update({"val_loss": 0.85}, 0, 0.5)
    assert reported() == {500: 0.85}


@pytest.mark.parametrize("location", ["", "sqlite:////missing/study.db", "postgresql+psycopg://127.0.0.1:1/x"])
def test_run_continues_if_its_shared_study_does_not_respond(location, shared_trial, caplog, monkeypatch):
    run_dir, _ = shared_trial
    monkeypatch.setenv("FOUNDRY_STUDY_STORAGE", location)
    pruning = Pruning.of(run_dir, ALONE)
    assert pruning.update({"val_loss": 9.0}, 0, 0.5) is None
    assert "cannot read whether the search prunes this run" in caplog.text


def test_trial_that_another_command_has_completed_is_not_pruned(shared_trial, caplog):
    run_dir, _ = shared_trial
    study = optuna.load_study(study_name="s", storage=open_storage(run_dir.parent / "optuna.jsonl"))
    study.tell(1, 0.1)
    assert Pruning.of(run_dir, ALONE).update({"val_loss": 9.0}, 0, 0.5) is None
