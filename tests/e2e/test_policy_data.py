"""Runs on episodes: the run directory has the statistics, so that the demonstrations are not needed again."""

import json
import shutil

import numpy as np
import pytest
from support.evaluated import evaluate
from support.lerobot_parts import write_by_hand
from support.reach import Reach

from foundry.commands.export import ExportOptions, export
from foundry.commands.library import compose, run
from foundry.core.errors import ConfigError
from foundry.engine.restore import restore
from foundry.tasks.robots.data.demonstrations import FIRST_SEED
from foundry.tasks.robots.data.statistics import Statistics, statistics_of

SMALL = ["hparams=policy", "model.hidden_size=16", "model.num_layers=1", "model.num_heads=2", "hparams.max_steps=4"]
SMALL += ["data.horizon=8", "objective.action_steps=4", "hparams.global_batch_size=16", "tracking=none"]
SMALL += ["hparams.per_gpu_batch_size=16", "data.held_out=0.3"]
REACH = ["simulator=reach", "data.noise=0.02", "data.episodes=6", "evaluation.evaluators.success.episodes=2"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a run whose demonstrations are deleted."""
    folder = tmp_path_factory.mktemp("policy")
    (folder / "conf/simulator").mkdir(parents=True)
    own = "_target_: support.reach.Reach\nstate_dim: 4\naction_dim: 2\nimage_size: null\nmax_steps: 30\n"
    (folder / "conf/simulator/reach.yaml").write_text(own)
    config = compose([*SMALL, *REACH, f"data.cache_dir={folder / 'cache'}"], config_dir=folder / "conf")
    assert (config.data.state_dim, config.data.action_dim, config.data.image_size) == (4, 2, None)
    run(config, folder / "run")
    plan = json.loads((folder / "run/plan.json").read_text())
    assert (plan["notes"]["train_episodes"], plan["notes"]["validation_episodes"]) == (4, 2)
    shutil.rmtree(folder / "cache")
    return folder / "run"


@pytest.fixture
def copied(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def test_policy_run_is_restored_with_statistics_without_demonstrations(finished):
    restored = restore(finished, "last", ema=True, trust=True)
    assert len(restored.data.train) == len(restored.data.validation) == 0
    state = Reach().reset(FIRST_SEED)["state"]
    written = Statistics.from_json((finished / "statistics.json").read_text())
    assert np.array_equal(statistics_of(restored.data).normalise_state(state), written.normalise_state(state))
    assert statistics_of(restored.data).actions.max.tolist() == pytest.approx([0.1, 0.1])
    assert not (finished.parent / "cache").exists()


def test_eval_of_a_policy_needs_no_demonstrations(finished, tmp_path):
    result = evaluate(run=str(finished), trust=True, episodes=3, out=str(tmp_path / "found.json"))
    assert 0 <= result["success"] <= 1
    assert not (finished.parent / "cache").exists()


def test_policy_export_has_the_statistics_of_the_run(finished, tmp_path):
    export(ExportOptions(run=str(finished), out=str(tmp_path / "out"), trust=True))
    assert (tmp_path / "out/statistics.json").read_text() == (finished / "statistics.json").read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no statistics.json, which a run over episodes writes"),
        ("{", r"statistics\.json is not JSON"),
        ("{}", r"statistics\.json has a state that"),
        ("[" * 10**5, r"statistics\.json is not JSON"),
    ],
)
def test_restore_refuses_missing_or_invalid_statistics(content, message, copied):
    (copied / "statistics.json").unlink()
    if content is not None:
        (copied / "statistics.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        restore(copied, "last", ema=True, trust=True)


def test_restore_refuses_statistics_behind_a_symlink(copied, tmp_path):
    (copied / "statistics.json").rename(tmp_path / "elsewhere.json")
    (copied / "statistics.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(ConfigError, match="symbolic link"):
        restore(copied, "last", ema=True, trust=True)


@pytest.mark.long
def test_eval_on_other_episodes_normalizes_by_the_statistics_of_the_run(tmp_path):
    """Shifted actions have a high loss only if the statistics of the run, not their own, normalize them."""
    for name in ("own", "shifted"):
        (tmp_path / name).mkdir()
        write_by_hand(tmp_path / name)
    import pyarrow as pa
    import pyarrow.parquet as pq

    for file in (tmp_path / "shifted/data").rglob("*.parquet"):
        rows = pq.read_table(file).to_pylist()
        moved = [row | {"action": [number + 50 for number in row["action"]]} for row in rows]
        pq.write_table(pa.Table.from_pylist(moved), file)
    common = ["data=lerobot", "simulator=none", "evaluation=default"]
    run(compose([*SMALL, *common, f"data.path={tmp_path / 'own'}"]), tmp_path / "run")
    losses = {}
    for name in ("own", "shifted"):
        words = [
            "data=lerobot",
            f"data.path={tmp_path / name}",
            "data.horizon=8",
            "data.held_out=0.3",
        ]
        losses[name] = evaluate(words, run=str(tmp_path / "run"), out=str(tmp_path / f"{name}.json"))["loss"]
    assert losses["shifted"] > 100 * losses["own"]


def test_compose_refuses_settings_that_do_not_fit_recorded_episodes(tmp_path):
    def lines(*overrides):
        with pytest.raises(ConfigError) as refused:
            compose(["hparams=policy", "evaluation=default", "simulator=none", *overrides])
        return str(refused.value).splitlines()

    (tmp_path / "recorded").mkdir()
    write_by_hand(tmp_path / "recorded", kind="image")
    here = f"data.path={tmp_path / 'recorded'}"
    config = compose(["hparams=policy", "evaluation=default", "simulator=none", "data=lerobot", here])
    assert (config.data.state_dim, config.data.action_dim, config.data.image_size) == (3, 2, None)
    camera = "data.image_key=observation.images.front"
    seen = compose(["hparams=policy", "evaluation=default", "simulator=none", "data=lerobot", here, camera])
    assert seen.data.image_size == seen.model.image_size == 16
    assert lines("data=demonstrations")[0].startswith("simulator: none is incompatible with data=demonstrations")
    assert lines("data=lerobot") == ["data.path: has no value (folder with meta/info.json); give it as data.path=..."]
    assert lines("data=lerobot", "data.path=/nothing") == [
        "data.path: is /nothing, which does not exist; give the folder of a LeRobot dataset"
    ]
    assert lines("data=lerobot", here, "data.state_dim=5")[0].startswith("data.state_dim: is 5 but observation.state")
    (wrong,) = lines("data=lerobot", here, "data.action_key=actions")
    assert wrong.startswith("data.action_key: is actions but that is not a column")
    (unseen,) = lines("data=lerobot", here, "data.image_size=64")
    assert unseen == "data.image_size: is 64 but has no effect without data.image_key"
