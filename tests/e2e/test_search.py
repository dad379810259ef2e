"""`hydra/sweeper=optuna`: pruning, resuming, failures, and refusal of a search as a whole."""

import json
import signal

import pytest
from support.examples import long_case
from support.tiny import TINY_DIT
from support.warm import WarmShell

from foundry.config.packages import pip_command
from foundry.run_dir.study_storage import open_storage

optuna = pytest.importorskip("optuna", reason="needs the extra search")
TrialState = optuna.trial.TrialState
SEARCH = [
    *TINY_DIT,
    "hparams_search=optuna_tpe",
    "hparams.max_steps=20",
    "evaluation.max_samples=64",
    "evaluation.interval=0.1 run",
    "tracking=none",
    "hydra.sweep.dir=sweep",
    "hydra.sweeper.pruner.n_startup_trials=2",
]


def read(path):
    return json.loads(path.read_text())


def trials(sweep):
    return optuna.load_study(study_name="search", storage=open_storage(sweep / "optuna.jsonl")).get_trials()


def outcomes(sweep):
    """Return the state, parameters, value and intermediate values of each trial."""
    return [(trial.state.name, trial.params, trial.value, trial.intermediate_values) for trial in trials(sweep)]


def jobs(sweep):
    return read(sweep / "sweep.json")["jobs"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, cache):
    """An uninterrupted search of seven trials, and its stdout; read-only."""
    shell = WarmShell(tmp_path_factory.mktemp("search"), cache)
    stdout, _ = shell.run(*SEARCH, "hydra.sweeper.n_trials=7")
    return shell, shell.cwd / "sweep", stdout


def test_search_prunes_unpromising_trials(undisturbed):
    _, sweep, stdout = undisturbed
    ended = trials(sweep)
    pruned = [trial for trial in ended if trial.state is TrialState.PRUNED]
    assert {trial.state for trial in ended} == {TrialState.COMPLETE, TrialState.PRUNED}
    assert len(ended) == len(jobs(sweep)) == 7
    for trial, job in zip(ended, jobs(sweep), strict=True):
        result, status = read(sweep / job["dir"] / "result.json"), read(sweep / job["dir"] / "status.json")
        assert trial.value == result["val_loss"]
        assert status["state"] == "finished"
        assert (result["pruned"] is not None) == (trial in pruned) == (result["step"] < 20)
        assert status["reason"] == (result["pruned"] or "")
        shares = [step / 1000 for step in trial.intermediate_values]
        assert shares == [k / 10 for k in range(1, 1 + min(9, result["step"] // 2))]
    assert f"\nbest: job {min(ended, key=lambda trial: trial.value).number}," in stdout


def test_trial_parameters_are_the_overrides_of_its_job(undisturbed):
    _, sweep, _ = undisturbed
    for trial, job in zip(trials(sweep), jobs(sweep), strict=True):
        overrides = dict(word.split("=") for word in job["overrides"])
        assert float(overrides["hparams.lr"]) == pytest.approx(trial.params["hparams.lr"], rel=1e-3)
        assert overrides["scheduler.warmup"] == trial.params["scheduler.warmup"]


@pytest.mark.long
def test_interrupted_search_resumes_with_the_same_trials(undisturbed, shell):
    _, expected, _ = undisturbed
    process = shell.start(*SEARCH, "hydra.sweeper.n_trials=5")
    for line in process.stdout:
        if line.startswith("job 2 "):
            process.send_signal(signal.SIGINT)
            break
    process.communicate(timeout=240)
    assert process.returncode == 130
    sweep = shell.cwd / "sweep"
    assert [trial.state for trial in trials(sweep)][2:] == [TrialState.RUNNING]
    finished = (sweep / "0" / "result.json").stat().st_mtime_ns
    shell.run(*SEARCH, "hydra.sweeper.n_trials=7")
    assert outcomes(sweep) == outcomes(expected)
    assert (sweep / "0" / "result.json").stat().st_mtime_ns == finished


@pytest.mark.long
def test_another_search_in_the_same_sweep_dir_is_refused(undisturbed):
    shell, sweep, _ = undisturbed
    before = {path: path.stat().st_mtime_ns for path in sweep.rglob("*")}
    _, stderr = shell.run(*SEARCH, "hparams.lr=interval(1e-4,1e-1)", "hydra.sweeper.direction=maximize", code=2)
    (line,) = stderr.splitlines()
    assert line.startswith("hydra.sweep.dir: is sweep, which contains a search with hparams.lr FloatDistribution(")
    assert "direction minimize; use these settings, or another folder" in line
    _, stderr = shell.run(*SEARCH, "hparams.grad_clip_norm=0.5", code=2)
    assert "contains this sweep with hparams.grad_clip_norm: 1 -> 0.5 in job 0" in stderr
    assert {path: path.stat().st_mtime_ns for path in sweep.rglob("*")} == before


@pytest.mark.long
def test_search_ends_after_max_failures_and_marks_failed_trials(shell):
    """The launcher runs two jobs at a time, with a learning rate that diverges."""
    local = ["hydra/launcher=local", "hydra.launcher.n_jobs=2", "hydra.sweeper.n_jobs=2", "hydra.sweeper.wait=batch"]
    overrides = [*SEARCH, *local, "hydra.sweeper.n_trials=12", "hydra.sweeper.max_failures=2"]
    overrides += ["hparams.lr=1e30", "scheduler.warmup='0.1'", "optimizer.weight_decay=0.0", "hparams.seed=range(50)"]
    _, stderr = shell.run(*overrides, code=1)
    sweep = shell.cwd / "sweep"
    states = [trial.state for trial in trials(sweep)]
    assert states.count(TrialState.FAIL) == 2
    assert len(jobs(sweep)) == 2
    ended, *lines = stderr.splitlines()
    assert ended == "the search ends: 2 jobs have failed (hydra.sweeper.max_failures)"
    assert [line.split(")")[0].split("=")[0] for line in lines] == [
        "job 0 (hparams.seed",
        "job 1 (hparams.seed",
    ]
    assert stderr.count("NonFiniteError") == 2


@pytest.mark.long
def test_pruned_trial_of_two_ranks_ends_on_both(shell):
    """The pruner ends each trial whose loss is above 0."""
    options = shell.cwd / "own" / "hydra" / "sweeper" / "pruner"
    options.mkdir(parents=True)
    (options / "mine.yaml").write_text("_target_: optuna.pruners.ThresholdPruner\nupper: 0.0\n")
    overrides = [word for word in SEARCH if "pruner" not in word]
    two = ["distributed=fsdp", "distributed.nproc_per_node=2", "hparams.per_gpu_batch_size=8"]
    shell.run("--config-dir=own", *overrides, "hydra/sweeper/pruner=mine", *two, "hydra.sweeper.n_trials=1")
    result = read(shell.cwd / "sweep" / "0" / "result.json")
    assert result["step"] == 2
    assert result["pruned"].startswith("pruned: val_loss ")
    assert [trial.state for trial in trials(shell.cwd / "sweep")] == [TrialState.PRUNED]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["hydra.sweeper.metric=val_los"],
            ["hydra.sweeper.metric: is val_los but evaluations measure val_loss; did you mean val_loss?"],
        ),
        long_case(["hydra.sweeper.n_trials=0"], ["hydra.sweeper.n_trials: is 0 but must be at least 1"]),
        long_case(
            ["hydra.sweeper.sampler._target_=optuna.samplers.Nope"],
            ["hydra.sweeper.sampler: cannot be built: optuna.samplers has no Nope"],
        ),
        long_case(["+hydra.sweeper.sampler.sed=3"], ["hydra.sweeper.sampler: cannot be built: TPESampler.__init__()"]),
        long_case(
            ["hydra.sweeper.pruner._target_=optuna.pruners.Nope"],
            ["hydra.sweeper.pruner: cannot be built: optuna.pruners has no Nope"],
        ),
        long_case(["hparams.lr=interval(1,0)"], ["hparams.lr: is interval(1,0): "]),
        (
            ["model.num_heads=choice(1,2,3,5)"],
            ["num_heads=5: model.num_heads: is 5 but must", "num_heads=3: model.num_heads: is 3 but must divide"],
        ),
        long_case(["hparams.lr=interval(1e-3,-0.5)"], ["hparams.lr: is interval"]),
        (["hydra/launcher=slurm", "hydra.launcher.detach=true"], ["hydra.launcher.detach: is true but a search"]),
    ],
)
def test_invalid_search_is_refused_before_any_job_starts(run_command, overrides, message):
    _, stderr = run_command(*SEARCH, *overrides, code=2)
    assert [part in line for part, line in zip(message, stderr.splitlines(), strict=True)] == [True] * len(message)
    assert list(run_command.cwd.iterdir()) == []


@pytest.mark.long
def test_search_without_optuna_names_the_install_command(cold_shell):
    shell = cold_shell
    (shell.cwd / "without").mkdir()
    (shell.cwd / "without" / "optuna.py").write_text("raise ImportError\n")
    _, stderr = shell.run("hparams_search=optuna_tpe", code=2, variables={"PYTHONPATH": "without"})
    said = f"hydra/sweeper: needs optuna, which is not installed; {pip_command('optuna', 'search')}"
    assert stderr.splitlines() == [said]
    assert [path.name for path in shell.cwd.iterdir()] == ["without"]


@pytest.mark.long
def test_proposal_with_conflicting_values_is_reported_and_counted_as_failed(shell):
    """Each value is valid with the other values of the first point, so that the conflict appears only in a proposal."""
    overrides = [*SEARCH, "hydra.sweeper.n_trials=7", "hydra.sweeper.pruner=null", "hydra/sweeper/sampler=random"]
    overrides += ["hparams.lr=1e-3", "scheduler.warmup=choice('0.1','0.6')", "optimizer.weight_decay=0.0"]
    overrides += ["scheduler=wsd", "scheduler.decay=choice('0.2','0.5')"]
    _, stderr = shell.run(*overrides, code=1)
    sweep = shell.cwd / "sweep"
    failed = [trial.params for trial in trials(sweep) if trial.state is TrialState.FAIL]
    assert failed
    assert all(params == {"scheduler.warmup": "0.6", "scheduler.decay": "0.5"} for params in failed)
    assert "scheduler.warmup=0.6, scheduler.decay=0.5 is skipped: scheduler" in stderr
    assert {trial.state for trial in trials(sweep)} == {TrialState.FAIL, TrialState.COMPLETE}
    assert all(" ".join(job["overrides"]) != "scheduler.warmup=0.6 scheduler.decay=0.5" for job in jobs(sweep))
