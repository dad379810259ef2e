"""`hydra/sweeper/pruner=asha`: jobs of a search pause at rungs, and the best of a rung continue."""

import json
import re
import signal

import pytest
from support.examples import long_case
from support.tiny import TINY_DIT

from foundry.run_dir.study_storage import open_storage

optuna = pytest.importorskip("optuna", reason="needs the extra search")
TrialState = optuna.trial.TrialState
RUN = [
    *TINY_DIT,
    "hparams.max_steps=20",
    "evaluation.max_samples=64",
    "evaluation.write_samples=false",
    "tracking=none",
]
SEARCH = [
    *RUN,
    "hparams_search=optuna_tpe",
    "hydra/sweeper/pruner=asha",
    "evaluation.interval=null",
    "hydra.sweep.dir=sweep",
    "hydra.sweeper.pruner.min_resource=5",
]


def read(path):
    return json.loads(path.read_text())


def trials(sweep):
    return optuna.load_study(study_name="search", storage=open_storage(str(sweep / "optuna.jsonl"))).get_trials()


def without_times(run_dir):
    """Return the metrics of a run by their steps, without durations and rates."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r.get("loss"), r.get("lr"), r.get("grad_norm")) for r in records if "loss" in r]


def test_best_third_of_the_rung_continues_as_a_run_that_did_not_pause(shell):
    stdout, _ = shell.run(*SEARCH, "hydra.sweeper.n_trials=3", "hydra.sweeper.pruner.max_rungs=1")
    sweep = shell.cwd / "sweep"
    ended = trials(sweep)
    assert sorted(trial.state.name for trial in ended) == ["COMPLETE", "PRUNED", "PRUNED"]
    best = min(ended, key=lambda trial: trial.intermediate_values[1])
    assert best.state is TrialState.COMPLETE
    for trial in ended:
        result, status = (read(sweep / str(trial.number) / name) for name in ("result.json", "status.json"))
        assert (result["status"], status["state"]) == ("finished", "finished")
        assert result["step"] == (20 if trial is best else 5)
        assert trial.value == result["val_loss"]
        assert ("pruned: rung 1 at 5 steps: val_loss " in status["reason"]) == (trial is not best)
    assert stdout.count("3 jobs: 3 finished; 2 of them pruned") == 1
    overrides = read(sweep / "sweep.json")["jobs"][best.number]["overrides"]
    shell.run(*RUN, *overrides, "evaluation.interval=null", "hydra.run.dir=alone")
    assert without_times(sweep / str(best.number)) == without_times(shell.cwd / "alone")
    assert read(shell.cwd / "alone" / "result.json")["val_loss"] == best.value


@pytest.mark.long
def test_interrupted_search_keeps_its_paused_jobs_and_ends(shell):
    two = ["hydra/launcher=local", "hydra.launcher.n_jobs=2", "hydra.sweeper.n_jobs=2", "hydra.sweeper.n_trials=9"]
    two += ["hydra.sweeper.pruner.min_resource=2", "hydra.sweeper.pruner.max_rungs=2"]
    process = shell.start(*SEARCH, *two)
    for line in process.stdout:
        if re.search(r": paused \(rung 1 at 2 steps: val_loss \d.*; 3 paused", line):
            process.send_signal(signal.SIGINT)
            break
    process.communicate(timeout=240)
    assert process.returncode == 130
    sweep = shell.cwd / "sweep"
    before = {trial.number: trial.intermediate_values for trial in trials(sweep)}
    assert {trial.state for trial in trials(sweep)} == {TrialState.RUNNING}
    assert sum(len(values) > 0 for values in before.values()) >= 3
    shell.run(*SEARCH, *two)
    ended = trials(sweep)
    assert len(ended) == 9
    assert {trial.state for trial in ended} == {TrialState.COMPLETE, TrialState.PRUNED}
    assert all(before[number].items() <= ended[number].intermediate_values.items() for number in before)
    by_rung = [sum(rung in trial.intermediate_values for trial in ended) for rung in (1, 2)]
    assert by_rung[0] == 9
    assert by_rung[1] >= 3


@pytest.mark.long
def test_two_ranks_pause_and_continue_together(shell):
    ranks = ["distributed=fsdp", "distributed.nproc_per_node=2", "hparams.per_gpu_batch_size=8"]
    halves = ["hydra.sweeper.pruner.reduction_factor=2", "hydra.sweeper.pruner.max_rungs=1"]
    shell.run(*SEARCH, *ranks, *halves, "hydra.sweeper.n_trials=2")
    ended = trials(shell.cwd / "sweep")
    assert sorted(trial.state.name for trial in ended) == ["COMPLETE", "PRUNED"]
    steps = {trial.state.name: read(shell.cwd / "sweep" / str(trial.number) / "result.json")["step"] for trial in ended}
    assert steps == {"COMPLETE": 20, "PRUNED": 5}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["hydra.sweeper.pruner.min_resource=20"],
            "hydra.sweeper.pruner.min_resource: is 20 steps, but the run has only 20; the first rung must be before",
        ),
        (
            ["hydra.sweeper.n_trials=8"],
            "hydra.sweeper.n_trials: is 8, but with 2 rungs and reduction_factor=3 only one of 9 jobs trains to its "
            "end; raise it, or set hydra.sweeper.pruner.max_rungs=1",
        ),
        long_case(
            ["hydra.sweeper.pruner.min_resource='3 samples'"],
            "hydra.sweeper.pruner.min_resource: is 3 samples, 0.19 of an optimizer step; a rung needs at least one",
        ),
        long_case(
            ["hydra.sweeper.pruner.min_resource='1M tokens'"],
            "hydra.sweeper.pruner.min_resource: 1e+06 tokens is a length in tokens, but samples of this data have no",
        ),
        long_case(["hydra.sweeper.pruner.min_resource=soon"], "hydra.sweeper.pruner.min_resource: 'soon' is not a dur"),
        long_case(["hydra.sweeper.pruner.reduction_factor=1"], "hydra.sweeper.pruner.reduction_factor: is 1 but must"),
        long_case(["hydra.sweeper.pruner.reduction_factor=e"], "hydra.sweeper.pruner.reduction_factor: is invalid: "),
        long_case(["+hydra.sweeper.pruner.eta=2"], "hydra.sweeper.pruner.eta: is invalid: Key 'eta' not in 'ASHA'"),
        long_case(["checkpoint=none"], "checkpoint: saves nothing, but a search with rungs continues its jobs from"),
        long_case(["hydra.sweeper.metric=null"], "hydra.sweeper.metric: is null but a search compares jobs"),
        long_case(["hydra.sweeper.wait=batch"], "hydra.sweeper.wait: is batch but asha promotes a job as soon as"),
        long_case(["hydra.sweeper.storage=x.jsonl"], "hydra.sweeper.storage: is set but asha needs its own study"),
    ],
)
def test_invalid_rungs_are_refused_before_any_job_starts(run_command, overrides, message):
    _, stderr = run_command(*SEARCH, "hydra.sweeper.n_trials=9", *overrides, code=2)
    assert [line.startswith(message) for line in stderr.splitlines()] == [True]
    assert list(run_command.cwd.iterdir()) == []
