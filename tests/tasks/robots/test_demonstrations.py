"""Demonstrations: clean expert actions from successful episodes, made once for all seeds."""

import itertools
import json
import logging
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from support.reach import Reach

from foundry.core.errors import ConfigError
from foundry.tasks.robots.data.demonstrations import FIRST_SEED, demonstrations

SETTINGS = {
    "episodes": 12,
    "noise": 0.05,
    "noisy_share": 0.7,
    "state_dim": 4,
    "action_dim": 2,
    "image_size": None,
    "num_observations": 2,
    "horizon": 4,
    "held_out": 0.2,
}

CODE_OF_SIMULATORS = "8bd8d86608471d677607f7be018664de0c0dce3ce2b3fd550a3a61531a3e8ffe"


class Watched(Reach):
    """Records the calls of the simulator."""

    seeds, executed, clean, closed = [], [], [], []

    def reset(self, seed):
        self.seeds.append(seed)
        return super().reset(seed)

    def step(self, action):
        self.executed.append(action)
        return super().step(action)

    def expert_action(self):
        self.clean.append(super().expert_action())
        return self.clean[-1]

    def close(self):
        self.closed.append(True)


@pytest.fixture
def watched():
    for kept in (Watched.seeds, Watched.executed, Watched.clean, Watched.closed):
        kept.clear()
    return Watched


class Inept(Reach):
    def expert_action(self):
        return np.zeros(2)


class Untaught(Reach):
    expert_action = None


def make(cache, simulator=Reach, *, seed=0, **changed):
    kind = getattr(simulator, "func", simulator)
    settings = {"_target_": f"{kind.__module__}.{kind.__name__}"}
    common = {"cache_dir": str(cache), "simulator": simulator, "simulator_settings": settings}
    return demonstrations(seed=seed, **common, **SETTINGS | changed)


def raw(data):
    """Return the rows of all Parquet files of the demonstrations, in the order of file names."""
    files = sorted(Path(data.notes["demonstrations"]).glob("data/*/*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def test_recorded_actions_are_clean_while_noisy_ones_are_executed(tmp_path, watched):
    rows = raw(make(tmp_path, watched, noisy_share=1.0))
    executed, clean = np.array(watched.executed), np.array(watched.clean)
    assert watched.closed
    kept = {tuple(row["action"]) for row in rows}
    assert kept <= {tuple(action) for action in clean.astype(np.float32).tolist()}
    noise = executed - clean
    assert noise.std() == pytest.approx(0.05, rel=0.2)
    assert abs(noise.mean()) < 0.02


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0.0, 0.0), (0.7, 0.5, 0.9), (1.0, 1.0, 1.0)])
def test_noisy_share_is_the_fraction_of_episodes_with_noise(share, low, high, tmp_path, watched):
    make(tmp_path, watched, noisy_share=share, episodes=60, noise=0.01)
    noise = np.abs(np.array(watched.executed) - np.array(watched.clean)).max(axis=1)
    starts = np.cumsum([0, *(len(one) for one in _episodes(watched))])
    noisy = [bool(noise[a:b].max() > 0) for a, b in itertools.pairwise(starts)]
    assert low <= np.mean(noisy) <= high


def _episodes(watched):
    """Return the executed actions by episode, found by replaying them after the reset of each episode."""
    simulator, executed, episodes = Reach(), list(watched.executed), []
    for seed in watched.seeds:
        simulator.reset(seed)
        at_goal, ended, steps = 0, False, []
        while at_goal < 8 and not ended:
            steps.append(executed.pop(0))
            _, success, ended = simulator.step(steps[-1])
            at_goal = at_goal + 1 if success else 0
        episodes.append(steps)
    assert not executed
    return episodes


def test_demonstrations_end_at_the_goal_and_use_reserved_seeds(tmp_path, watched):
    data = make(tmp_path, watched)
    assert watched.seeds == list(range(FIRST_SEED, FIRST_SEED + len(watched.seeds)))
    lengths = np.bincount([row["episode_index"] for row in raw(data)])
    assert len(lengths) == 12
    rows, last = raw(data), np.cumsum(lengths) - 1
    for end in last:
        point, goal = np.array(rows[end]["observation.state"]).reshape(2, 2)
        assert np.abs(point - goal).max() < 0.2


def test_demonstrations_are_cached_and_equal_for_every_seed(tmp_path, watched, caplog):
    caplog.set_level(logging.INFO)
    first = make(tmp_path, watched)
    (made,) = [record.getMessage() for record in caplog.records if "demonstrations" in record.getMessage()]
    frames = first.notes["train_frames"] + first.notes["validation_frames"]
    assert made.startswith(f"generated 12 demonstrations of Watched, {frames} frames, in ")
    asked = len(watched.seeds)
    again = make(tmp_path, watched, seed=7)
    assert len(watched.seeds) == asked
    assert again.fingerprint == first.fingerprint
    elsewhere = make(tmp_path / "other", watched, seed=3)
    assert len(watched.seeds) == 2 * asked
    assert elsewhere.fingerprint == first.fingerprint


@pytest.mark.parametrize("changed", [{"noise": 0.04}, {"episodes": 13}, {"noisy_share": 0.1}])
def test_changed_settings_make_other_demonstrations(changed, tmp_path):
    first, other = make(tmp_path), make(tmp_path, **changed)
    assert first.notes["demonstrations"] != other.notes["demonstrations"]
    assert first.fingerprint != other.fingerprint


def test_changed_package_or_simulator_code_makes_a_new_folder(tmp_path, monkeypatch):
    first = make(tmp_path).notes["demonstrations"]
    with monkeypatch.context() as patch:
        patch.setattr("foundry.tasks.robots.data.simulated._version", lambda name: "0")
        assert make(tmp_path).notes["demonstrations"] != first
    derived = "from support.reach import Reach as Own\n\n\nclass Mine(Own):\n    "
    (tmp_path / "own_reach.py").write_text(f"{derived}pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    from foundry.tasks.robots.data.simulated import _sources

    before = _sources("own_reach.Mine")
    (tmp_path / "own_reach.py").write_text(f"{derived}fps = 5\n")
    assert before != ""
    assert _sources("own_reach.Mine") != before


def test_images_of_demonstrations_are_those_of_the_simulator(tmp_path):
    data = make(tmp_path, partial(Reach, image_size=16), image_size=16, noise=0.0, episodes=5)
    simulator = Reach(image_size=16)
    shown = simulator.reset(FIRST_SEED)
    first_of_train = data.train.batch(range(len(data.train)))
    assert first_of_train["images"].shape[1:] == (2, 3, 16, 16)
    shown = shown["image"].transpose(2, 0, 1)
    held_and_train = [data.train[0]["images"][0].numpy(), data.validation[0]["images"][0].numpy()]
    assert any(np.array_equal(shown, picture) for picture in held_and_train)


def test_demonstration_folder_records_robot_type_fps_and_task(tmp_path):
    folder = make(tmp_path).notes["demonstrations"]
    info = json.loads((Path(folder) / "meta/info.json").read_text())
    assert (info["robot_type"], info["fps"], info["total_episodes"]) == ("Reach", 10, 12)
    tasks = pq.read_table(f"{folder}/meta/tasks.parquet").to_pylist()
    assert tasks == [{"task_index": 0, "task": "reach the goal"}]


@pytest.mark.parametrize(
    ("simulator", "changed", "message"),
    [
        (None, {}, "simulator: none is incompatible with data=demonstrations, which needs a simulator with an expert"),
        (Untaught, {}, r"data: is demonstrations but Untaught has no expert_action\(\); .*data=lerobot"),
        (Inept, {}, r"data\.noise: is 0\.05 but the expert of Inept has failed in 2\d of 2\d episodes"),
        (Reach, {"state_dim": 5}, r"data\.state_dim: is 5 but Reach has 4"),
        (Reach, {"action_dim": 3}, r"data\.action_dim: is 3 but Reach has 2"),
        (Reach, {"image_size": 16}, r"data\.image_size: is 16 but Reach returns no image of this size"),
    ],
)
def test_impossible_demonstrations_are_refused_and_leave_no_folder(simulator, changed, message, tmp_path):
    settings = SETTINGS | changed
    with pytest.raises(ConfigError, match=message):
        demonstrations(seed=0, cache_dir=str(tmp_path), simulator=simulator, simulator_settings={}, **settings)
    assert not [entry for entry in tmp_path.iterdir() if entry.is_dir()]


def test_digest_of_builtin_simulator_code_is_current():
    """If a simulator acts or renders differently, change `_OWN_SOURCES`; after any change update the digest here."""
    from foundry.tasks.robots import simulators
    from foundry.tasks.robots.data.simulated import _OWN_SOURCES, _sources

    lines = [
        line
        for file in sorted(Path(simulators.__file__).parent.glob("*.py"))
        for line in file.read_text(encoding="utf-8").splitlines()
        if not line.lstrip().startswith(("from ", "import "))
    ]
    assert sha256("\n".join(lines).encode()).hexdigest() == CODE_OF_SIMULATORS
    assert _sources("foundry.Tabletop") == _sources("foundry.simulators.tabletop.Tabletop") == _OWN_SOURCES
