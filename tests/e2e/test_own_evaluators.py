"""Runs with a user's own evaluator or stop rule, and runs without a metric."""

import json

import pytest
from support.in_process import Commands
from support.tiny import PLOTS, TINY_LM
from support.warm import WarmShell

OWN = '''
class Success:
    """0.5, 0.75, 0.5, … of the episodes; a part of them on every rank."""

    def __init__(self, *, episodes, seed):
        self.episodes, self.seed, self.calls = episodes, seed, 0

    def evaluate(self, model, context):
        import torch

        assert not model.training and not torch.is_grad_enabled()
        self.calls += 1
        own = torch.tensor(0.5 + 0.25 * (self.calls % 2 == 0), dtype=torch.float64) / context.world.dp_size
        return {"success": context.world.dp_sum(own).item()}


class Enough:
    def __init__(self, *, evaluations):
        self.left = evaluations

    def update(self, metrics, epoch, share):
        self.left -= 1
        return f"enough at {share:.0%}" if self.left == 0 else None

    def result(self):
        return {"enough": self.left}

    def state_dict(self):
        return {"left": self.left}

    def load_state_dict(self, state):
        self.left = state["left"]


class Incomplete:
    def evaluate(self, model):
        return {"success": 1.0}
'''
ROBOT = "+evaluation.evaluators.robot={_target_: own.Success, episodes: 4, metrics: [success]}"
ONLY = ["~evaluation.evaluators.held_out", "evaluation.write_samples=false"]
STEPS = ["evaluation.interval='1 steps'", "hparams.max_steps=3"]


@pytest.fixture
def shell(tmp_path, cache):
    (tmp_path / "own.py").write_text(OWN)
    return WarmShell(tmp_path, cache, {"PYTHONPATH": "."})


@pytest.fixture
def run_command(shell, cache):
    return Commands(shell.cwd, cache, shell.variables)


def read(shell, name, run="run"):
    return json.loads((shell.cwd / run / name).read_text())


def evaluations(shell):
    lines = map(json.loads, (shell.cwd / "run" / "metrics.jsonl").open())
    return [line for line in lines if "loss" not in line]


@pytest.mark.long
def test_own_evaluator_without_held_out_loss_selects_the_best_checkpoint(run_command):
    overrides = [
        *TINY_LM,
        *PLOTS,
        *ONLY,
        *STEPS,
        ROBOT,
        "evaluation.metric=val_success",
        "evaluation.direction=maximize",
    ]
    stdout, _ = run_command(*overrides, "hydra.run.dir=run")
    assert [line["val_success"] for line in evaluations(run_command)] == [0.5, 0.75, 0.5]
    assert all("val_loss" not in line for line in evaluations(run_command))
    result = read(run_command, "result.json")
    assert (result["metric"], result["best"]) == (0.5, {"step": 2, "val_success": 0.75})
    assert (run_command.cwd / "run" / "checkpoints" / "best").resolve().name == "step_00000002"
    assert "val_success 0.75" in stdout
    assert "held-out" not in stdout
    assert (run_command.cwd / "run" / "plots" / "loss.png").is_file()


def test_own_stop_rule_ends_the_run(run_command):
    rule = "+evaluation.stop_rules.enough={_target_: own.Enough, evaluations: 2}"
    run_command(*TINY_LM, *STEPS, rule, "evaluation.write_samples=false", "hydra.run.dir=run")
    result = read(run_command, "result.json")
    assert (result["step"], result["enough"]) == (2, 0)
    assert read(run_command, "status.json")["reason"] == "enough at 67%"


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ("evaluators", "whose evaluate(model) does not accept a call of evaluate(model, context)"),
        ("stop_rules", "which has no method update(metrics, epoch, share)"),
    ],
)
def test_part_without_a_method_is_refused_before_the_first_step(run_command, part, problem):
    own = f"+evaluation.{part}.own={{_target_: own.Incomplete}}"
    _, stderr = run_command(*TINY_LM, own, "hydra.run.dir=run", code=2)
    assert stderr.startswith(f"evaluation.{part}.own._target_: returns an object of type Incomplete, {problem}\n")
    assert not (run_command.cwd / "run" / "metrics.jsonl").exists()


@pytest.mark.long
def test_run_and_sweep_finish_without_a_metric(shell):
    overrides = [*TINY_LM, *ONLY, "evaluation.metric=null", "tracking.mlflow=true", "hparams.max_steps=2"]
    shell.run(*overrides, "hydra.run.dir=run")
    result = read(shell, "result.json")
    assert (result["metric"], result["best"], result["step"]) == (None, None, 2)
    assert read(shell, "status.json")["state"] == "finished"
    stdout, _ = shell.run("-m", *overrides, "hparams.lr=1e-3,2e-3", "hydra.sweep.dir=sweep")
    assert "no metric to compare jobs by" in stdout
    assert read(shell, "result.json", "sweep/1")["metric"] is None


@pytest.mark.long
def test_sweep_compares_jobs_by_the_metric_of_its_runs(shell):
    overrides = [*TINY_LM, *ONLY, ROBOT, "evaluation.metric=val_success", "evaluation.direction=maximize"]
    shell.run("-m", *overrides, "hparams.max_steps=2", "hparams.lr=1e-3,2e-3", "hydra.sweep.dir=sweep")
    sweep = read(shell, "sweep.json", "sweep")
    assert (sweep["metric"], sweep["direction"]) == ("val_success", "maximize")


@pytest.mark.long
def test_two_evaluators_of_the_same_metric_are_refused(shell):
    twice = ROBOT.replace(".robot=", ".again=")
    _, stderr = shell.run(*TINY_LM, *ONLY, ROBOT, twice, "evaluation.metric=val_success", code=2)
    assert stderr.startswith(
        "evaluation.evaluators.again: measures val_success, which an earlier evaluator also measures"
    )
