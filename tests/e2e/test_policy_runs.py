"""Policy runs evaluated by their success in a simulator, and `foundry.eval` of them."""

import json
import shutil
import signal
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support import policy_parts
from support.composition import configure
from support.evaluated import evaluate
from support.policy_parts import REACH_POLICY
from support.reach import Reach

from foundry.core.errors import ConfigError
from foundry.engine.train import train
from foundry.tasks.robots.evaluators.rates import sign_test, wilson_interval

QUIET = ["tracking=none", "tracking.progress=false"]
OWN_OPTIONS = str(Path(__file__).parent / "conf")
EVERY_20 = ["hparams.max_steps=60", "evaluation.interval='20 steps'"]

needs_parquet = pytest.mark.skipif(find_spec("pyarrow") is None, reason="needs the extra robot")


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def result_of(run_dir):
    return json.loads((run_dir / "result.json").read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the runs `good`, which succeeds in most episodes, and `poor`."""
    folder = tmp_path_factory.mktemp("runs")
    train(configure(*REACH_POLICY, *QUIET, *EVERY_20, "checkpoint.keep_best.metric=val_success"), folder / "good")
    poor = ["hparams.max_steps=45", "hparams.seed=3", "evaluation.interval=null", "evaluation.write_samples=false"]
    train(configure(*REACH_POLICY, *QUIET, *poor), folder / "poor")
    return folder


def test_best_checkpoint_has_the_highest_success_rate(runs):
    measured = {line["step"]: line["val_success"] for line in lines(runs / "good/metrics.jsonl") if "val_loss" in line}
    assert list(measured) == [20, 40, 60]
    assert measured[60] > max(measured[20], measured[40])
    result = result_of(runs / "good")
    assert result["best"] == {"step": 60, "val_success": measured[60]} == {"step": 60, "val_success": result["metric"]}
    assert (runs / "good/checkpoints/best").resolve().name == "step_00000060"
    names = {path.name for path in (runs / "good/plots").iterdir()}
    assert names == {"rollouts.jsonl", "rollouts.gif", *(f"rollouts_000000{step}.gif" for step in measured)}
    episodes = lines(runs / "good/plots/rollouts.jsonl")
    assert [(one["step"], one["episode"]) for one in episodes] == [(step, k) for step in measured for k in range(10)]
    assert [path.name for path in (runs / "poor/plots").iterdir()] == ["rollouts.jsonl"]


def test_early_stopping_ends_a_run_whose_success_does_not_improve(tmp_path):
    stopping = [f"evaluation.early_stopping.{word}" for word in ("patience=2", "unit=evaluations")]
    few = ["evaluation.evaluators.success.episodes=2", "hparams.max_steps=20", "evaluation.interval='2 steps'"]
    train(configure(*REACH_POLICY, *QUIET, *few, *stopping, "evaluation.evaluators.held_out=null"), tmp_path / "run")
    result = result_of(tmp_path / "run")
    assert (result["step"], result["best"]) == (6, {"step": 2, "val_success": 0.0})
    assert "val_loss" not in result


def test_eval_repeats_the_episodes_of_the_run_without_demonstrations(runs, monkeypatch, tmp_path, capsys):
    def lost(**settings):
        raise FileNotFoundError("the demonstrations are gone")

    monkeypatch.setattr(policy_parts, "demonstrations", lost)
    moved = shutil.copytree(runs / "good", tmp_path / "good", symlinks=True)
    measured = evaluate(run=str(moved), which="best", trust=True)
    result = result_of(runs / "good")
    names = ("success", "success_low", "success_high", "episode_length")
    assert {name: measured[name] for name in names} == {name: result[f"val_{name}"] for name in names}
    assert (measured["checkpoint"], measured["num_episodes"]) == ("step_00000060", 10)
    assert json.loads((moved / "eval.json").read_text()) == measured
    assert f"success        {measured['success']:.6g}\n" in capsys.readouterr().out
    more = evaluate(run=str(moved), which="20", trust=True, episodes=25, batch_size=8)
    assert (more["num_episodes"], more["checkpoint"]) == (25, "step_00000020")
    assert more["success"] < measured["success"]
    for first, folder in ((0, "whole"), (6, "later")):
        evaluate(run=str(moved), trust=True, episodes=10 - first, first_episode=first, record=str(tmp_path / folder))
    assert lines(tmp_path / "later/rollouts.jsonl")[:4] == lines(tmp_path / "whole/rollouts.jsonl")[6:10]


@pytest.mark.long
def test_eval_against_compares_two_policies_on_the_same_episodes(runs, tmp_path):
    options = {"run": str(runs / "good"), "trust": True, "episodes": 24, "out": str(tmp_path / "eval.json")}
    measured = evaluate(**options, against=str(runs / "poor"), record=str(tmp_path / "films"))
    alone = evaluate(**options)
    assert alone.items() <= measured.items()
    record = lines(tmp_path / "films/rollouts.jsonl")
    pairs = [(one["success"], one["against_success"]) for one in record]
    only_run, only_against = pairs.count((True, False)), pairs.count((False, True))
    theirs = sum(other for _, other in pairs)
    assert measured["against"] == f"{runs / 'poor'} step_00000045"
    assert measured["against_success"] == theirs / 24
    assert (measured["against_success_low"], measured["against_success_high"]) == wilson_interval(theirs, 24)
    assert measured["difference"] == pytest.approx((only_run - only_against) / 24)
    assert (measured["only_run"], measured["only_against"]) == (only_run, only_against)
    assert measured["p_value"] == sign_test(only_run, only_against) < 0.05
    films = sorted(path.name for path in (tmp_path / "films").glob("*.gif"))
    assert films == [f"episode_{number:05d}.gif" for number in range(24)]
    with Image.open(tmp_path / "films" / films[0]) as picture:
        assert picture.size == (2 * 166, 166)
        assert picture.n_frames > 5
    same = evaluate(**options, against=str(runs / "good"), against_which="best")
    assert (same["difference"], same["p_value"]) == (0.0, 1.0)


def recorded(folder):
    """Write episodes of the expert of `Reach` as a LeRobot dataset with images of 16 pixels."""
    from foundry.tasks.robots.data.lerobot_writing import Episode, write_lerobot

    simulator = Reach(image_size=16)

    def episode(seed):
        observation, frames = simulator.reset(seed), []
        while True:
            action = simulator.expert_action().astype(np.float32)
            frames.append((observation["state"], action, observation["image"]))
            observation, success, ended = simulator.step(action)
            if success or ended:
                state, actions, images = map(np.stack, zip(*frames, strict=True))
                return Episode(state=state, actions=actions, images=images, task="reach the goal")

    write_lerobot(folder, (episode(2**32 + number) for number in range(60)), fps=10, robot_type="point")


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A folder with the runs `blind` (states only) and `seeing` (with images), trained without a simulator."""
    folder = tmp_path_factory.mktemp("taught")
    recorded(folder / "recorded")
    reading = ["data=lerobot", f"data.path={folder / 'recorded'}", "data.horizon=8", f"data.cache_dir={folder}"]
    alone = ["simulator=none", "evaluation=default", "evaluation.interval=null", "evaluation.write_samples=false"]
    words = [word for word in REACH_POLICY if not word.startswith(("data=", "simulator=", "evaluation"))]
    camera = ["data.image_key=observation.images.front", "hparams.max_steps=2"]
    for name, more in (("blind", ["hparams.max_steps=60"]), ("seeing", camera)):
        train(configure(*words, *reading, *alone, *QUIET, *more), folder / name)
    return folder


@needs_parquet
def test_policy_trained_on_recordings_is_evaluated_in_a_given_simulator(taught, tmp_path):
    options = {"episodes": 10, "out": str(tmp_path / "eval.json"), "config_dir": OWN_OPTIONS}
    blind, seeing = (str(taught / name) for name in ("blind", "seeing"))
    measured = evaluate(["simulator=reach"], run=blind, **options, against=seeing)
    assert measured["success"] > measured["against_success"]
    assert (measured["num_episodes"], measured["checkpoint"]) == (10, "step_00000060")
    short = evaluate(["simulator=reach", "simulator.max_steps=2"], run=blind, **options)
    assert (short["success"], short["episode_length"]) == (0.0, 2.0)
    with pytest.raises(ConfigError, match=r"simulator=none; choose one, .* data=lerobot"):
        evaluate(run=blind)


@needs_parquet
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["simulator=reach", "simulator.state_dim=7"],
            "simulator: has state_dim=7 but the policy of RUN was trained with state_dim=4; choose the simulator of",
        ),
        (
            ["simulator=reach", "simulator.image_size=32"],
            "simulator: has image_size=32 but the policy of RUN was trained with image_size=null; choose the",
        ),
        (["simulator=none"], "run: is RUN, a run with simulator=none; choose one, such as"),
        (["simulator=raech"], "simulator: has no option 'raech'; did you mean reach?"),
        (["simulator.image_size=32"], "simulator.image_size: is not a setting of the chosen simulator"),
        (
            ["simulator=reach", "data=digits"],
            "simulator: is reach but belongs to the evaluation of policies in a simulator, and RUN uses",
        ),
        ([], "config_dir: is CONF but no override uses it; add one, such as simulator=..., or leave it out"),
    ],
)
def test_eval_refuses_a_simulator_that_does_not_fit(taught, overrides, message):
    run = str(taught / "blind")
    with pytest.raises(ConfigError) as refused:
        evaluate(overrides, run=run, config_dir=OWN_OPTIONS)
    assert str(refused.value).startswith(message.replace("RUN", run).replace("CONF", OWN_OPTIONS))
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.long
def test_eval_runs_a_policy_in_another_simulator(runs, tmp_path):
    options = {"run": str(runs / "good"), "trust": True, "out": str(tmp_path / "eval.json"), "config_dir": OWN_OPTIONS}
    assert evaluate(["simulator=reach"], **options) == evaluate(**options | {"config_dir": None})
    longer = evaluate(["simulator=reach", "simulator.max_steps=60"], **options, against=str(runs / "poor"))
    assert longer["episode_length"] <= longer["against_episode_length"] <= 60


@pytest.mark.skipif(find_spec("mujoco") is None, reason="needs the extra robot")
def test_eval_of_a_built_in_policy_needs_no_trust(tmp_path):
    small = ["data.episodes=20", "hparams.max_steps=2", f"data.cache_dir={tmp_path / 'cache'}"]
    few = ["evaluation.evaluators.success.episodes=2", "evaluation.evaluators.success.at_a_time=2"]
    train(configure("hparams=policy", *QUIET, *small, *few, "evaluation.interval=null"), tmp_path / "run")
    shutil.rmtree(tmp_path / "cache")
    measured = evaluate(run=str(tmp_path / "run"), record=str(tmp_path / "films"))
    assert measured["success"] == result_of(tmp_path / "run")["val_success"]
    assert not (tmp_path / "cache").exists()
    assert (tmp_path / "run/plots/rollouts.gif").is_file() == (tmp_path / "films/episode_00000.gif").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trust": False}, "run: RUNS/good/config.yaml uses custom code: "),
        ({"which": "7"}, "which: RUNS/good has no checkpoint '7'; available: "),
        ({"against": "RUNS/nowhere"}, "against: RUNS/nowhere is not a run directory: it has no config.yaml"),
        ({"against": "RUNS/poor", "against_which": "7"}, "against_which: RUNS/poor has no checkpoint '7'"),
        ({"against_which": "best"}, "against_which: is best but has no effect without against; add against=DIR"),
        (
            {"max_samples": 3},
            "max_samples: is 3 but belongs to the evaluation on data, and RUNS/good uses the evaluation of policies",
        ),
        (
            {"first_episode": 2**32 - 5, "episodes": 6},
            "episodes: is 6 but leads to episode 4294967296; the last one is 4294967295",
        ),
        ({"record": "RUNS/good/config.yaml/films"}, "record: is RUNS/good/config.yaml/films but"),
        (
            {"against": "RUNS/longer"},
            "against: is RUNS/longer, whose simulator has max_steps=31 but that of run has 30",
        ),
        ({"run": "RUNS/damaged"}, "run: RUNS/damaged/config.yaml: evaluation.evaluators.success.episodes: is 0 but"),
        ({"run": "RUNS/still"}, "run: is RUNS/still, a run with simulator=none"),
    ],
)
def test_eval_of_policies_refuses_wrong_options_with_a_message(runs, options, message):
    def meant(value):
        return value.replace("RUNS", str(runs)) if isinstance(value, str) else value

    for name, old, new in (
        ("longer", "max_steps: 30", "max_steps: 31"),
        ("damaged", "episodes: 10", "episodes: 0"),
        (
            "still",
            "_target_: support.reach.Reach\n  state_dim: 4\n  action_dim: 2\n  image_size: null\n  max_steps: 30",
            "",
        ),
    ):
        if not (runs / name).exists():
            shutil.copytree(runs / "good", runs / name, symlinks=True)
            settings = (runs / name / "config.yaml").read_text()
            assert old in settings
            settings = settings.replace(old, new).replace("simulator:\n  \n", "simulator:\n  _target_: null\n")
            (runs / name / "config.yaml").write_text(settings)
    given = {"run": "RUNS/good", "trust": True} | options
    with pytest.raises(ConfigError) as refused:
        evaluate(**{k: v.replace("RUNS", str(runs)) if isinstance(v, str) else v for k, v in given.items()})
    assert str(refused.value).startswith(meant(message))


@pytest.mark.long
def test_killed_policy_run_has_the_episodes_of_an_uninterrupted_run(shell):
    steps = ["hparams.max_steps=12", "evaluation.interval='4 steps'", "checkpoint.interval='4 steps'"]
    settings = [*REACH_POLICY, *steps, "checkpoint.resume=auto"]
    shell.run(*settings, "hydra.run.dir=whole")
    process = shell.start(*settings, "hydra.run.dir=run")
    run_dir = shell.cwd / "run"
    shell.wait_for_steps(process, run_dir, 8)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    shell.run(*settings, "hydra.run.dir=run")
    assert lines(run_dir / "plots/rollouts.jsonl") == lines(shell.cwd / "whole/plots/rollouts.jsonl")
    for name in ("rollouts.gif", "rollouts_00000004.gif"):
        assert (run_dir / "plots" / name).read_bytes() == (shell.cwd / "whole/plots" / name).read_bytes()


@pytest.mark.long
def test_sweep_of_policy_runs_compares_jobs_by_success(shell):
    few = ["evaluation.evaluators.success.episodes=4", "evaluation.interval=null"]
    shell.run("-m", *REACH_POLICY, *few, "hparams.max_steps=4,60", "hydra.sweep.dir=sweep")
    sweep = json.loads((shell.cwd / "sweep/sweep.json").read_text())
    assert (sweep["metric"], sweep["direction"]) == ("val_success", "maximize")
    out, _ = shell.run("dir=sweep", module="foundry.report")
    assert "best: job 1, val_success" in out
