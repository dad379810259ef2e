import contextlib
import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.composition import compose, configure

from foundry.config.packages import pip_command
from foundry.core.errors import ConfigError
from foundry.core.simulator import Demonstrating
from foundry.parts.data import build_simulator
from foundry.tasks.robots.simulators.tabletop import Tabletop

if find_spec("mujoco") is None:
    pytest.skip("needs the extra robot", allow_module_level=True)

TASKS = ("around", "push", "touch")
SIMULATORS = {task: Tabletop(task=task) for task in TASKS}
SEEDS = st.integers(0, 2**33)


def episode(simulator, seed, act):
    """Return every state of an episode, and whether it succeeded."""
    states = [simulator.reset(seed)["state"]]
    while True:
        observation, success, ended = simulator.step(act(simulator))
        states.append(observation["state"])
        if success or ended:
            return np.array(states), success


def expert(simulator):
    return simulator.expert_action()


@pytest.mark.parametrize("task", TASKS)
def test_tabletop_expert_succeeds(task):
    assert isinstance(SIMULATORS[task], Demonstrating)
    assert np.mean([episode(SIMULATORS[task], seed, expert)[1] for seed in range(100)]) == 1.0


@pytest.mark.parametrize("task", TASKS)
def test_idle_policy_does_not_succeed(task):
    simulator = SIMULATORS[task]
    states, success = episode(simulator, 0, lambda _: np.zeros(2))
    assert (len(states), success) == (simulator.max_steps + 1, False)


@pytest.mark.parametrize("task", TASKS)
@settings(max_examples=10, deadline=None)
@given(seed=SEEDS, before=SEEDS)
def test_tabletop_episode_depends_on_its_seed_only(task, seed, before):
    simulator = SIMULATORS[task]
    first, _ = episode(simulator, seed, expert)
    instruction = simulator.instruction
    episode(simulator, before, lambda _: np.ones(2))
    again, _ = episode(simulator, seed, expert)
    fresh, _ = episode(Tabletop(task=task), seed, expert)
    np.testing.assert_array_equal(again, first)
    np.testing.assert_array_equal(fresh, first)
    assert simulator.instruction == instruction


def test_around_expert_picks_a_side_that_the_state_does_not_reveal():
    simulator, sides, offsets = SIMULATORS["around"], [], []
    for seed in range(200):
        start = simulator.reset(seed)["state"]
        offsets.append(start[6] - start[0])  # Offset of the green block from the pusher.
        sides.append(np.sign(simulator.expert_action()[0]))
    assert np.abs(offsets).max() < 0.02
    assert 0.4 < np.mean(np.array(sides) > 0) < 0.6
    assert abs(np.corrcoef(sides, offsets)[0, 1]) < 0.15


def test_around_fails_with_the_mean_of_both_ways():
    assert not any(episode(SIMULATORS["around"], seed, lambda _: np.array([0.0, 0.6]))[1] for seed in range(20))


@pytest.mark.parametrize("task", ["around", "touch"])
def test_touching_another_block_ends_the_episode(task):
    simulator = SIMULATORS[task]

    def towards_another(simulator):
        blocks = simulator._state()[2:14].reshape(3, 4)[:, :2]
        another = blocks[(simulator._target + 1) % 3]
        way = another - simulator._state()[:2]
        return way / np.linalg.norm(way)

    for seed in range(10):
        states, success = episode(simulator, seed, towards_another)
        assert not success
        assert len(states) < simulator.max_steps


def test_tabletop_actions_are_clipped():
    simulator = SIMULATORS["push"]
    ends = []
    for action in ((1, -1), (50, -7)):
        simulator.reset(5)
        ends.append(simulator.step(np.array(action, dtype=float)).observation["state"])
    np.testing.assert_array_equal(*ends)


@pytest.mark.parametrize("task", TASKS)
def test_tabletop_is_built_as_configured(task):
    simulator = build_simulator(configure(f"simulator={task}", "simulator.max_steps=7").simulator)
    assert (simulator.task, simulator.max_steps, simulator.fps) == (task, 7, 10)
    observation = simulator.reset(0)
    assert observation.keys() == {"state"}
    assert observation["state"].dtype == np.float32
    assert observation["state"].shape == (simulator.state_dim,)


@pytest.mark.egl
def test_tabletop_with_images_has_the_pusher_state_only():
    simulator = build_simulator(configure("simulator=push", "simulator.image_size=48").simulator)
    observation = simulator.reset(0)
    assert observation["state"].shape == (simulator.state_dim,) == (4,)
    assert observation["image"].shape == (48, 48, 3)
    assert observation["image"].dtype == np.uint8
    large = simulator.render(300)
    assert large.shape == (300, 300, 3)
    reds = (large[..., 0] > 150) & (large[..., 1] < 80)
    assert 0.001 < reds.mean() < 0.05
    np.testing.assert_array_equal(simulator.reset(0)["image"], observation["image"])
    simulator.close()
    simulator.close()


@pytest.mark.egl
def test_interleaved_tables_render_like_separate_ones():
    """All `Tabletop` simulators of a process share a renderer."""
    tables = {seed: Tabletop(task="push", image_size=32) for seed in (1, 2)}
    alone = {}
    for seed, table in tables.items():
        alone[seed] = [table.reset(seed)["image"], *(table.step(np.ones(2)).observation["image"] for _ in range(5))]
        alone[seed].append(table.render(96))
        table.close()
    together = {seed: [table.reset(seed)["image"]] for seed, table in tables.items()}
    for _ in range(5):
        for seed, table in tables.items():
            together[seed].append(table.step(np.ones(2)).observation["image"])
    for seed, table in tables.items():
        together[seed].append(table.render(96))
        table.close()
    assert not np.array_equal(alone[1][0], alone[2][0])
    for seed, pictures in alone.items():
        assert all(map(np.array_equal, pictures, together[seed]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("simulator.state_dim=3",), "simulator.state_dim: is 3 but task push has 19; leave it out"),
        (("simulator.action_dim=7",), "simulator.action_dim: is 7 but task push has 2; leave it out"),
        (
            ("simulator.task=tuch",),
            "simulator.task: is tuch but must be one of around, push, touch; did you mean touch?",
        ),
        (
            ("simulator.state_dim=19", "simulator.image_size=64"),
            "simulator.state_dim: is 19 but task push with a picture has 4; leave it out",
        ),
    ],
)
def test_wrong_tabletop_settings_are_config_errors(overrides, message):
    with pytest.raises(ConfigError) as refused:
        compose("simulator=push", *overrides)
    assert str(refused.value) == message


def test_missing_mujoco_names_the_extra(monkeypatch):
    composed = configure("simulator=around")
    monkeypatch.setitem(sys.modules, "mujoco", None)
    message = f"simulator: needs mujoco, which is not installed; {pip_command('mujoco', 'robot')}"
    with pytest.raises(ConfigError) as refused:
        compose("simulator=around")
    assert str(refused.value) == message
    with pytest.raises(ConfigError) as refused:
        build_simulator(composed.simulator)
    assert str(refused.value) == message


NO_EGL = """
import numpy as np
from foundry.tasks.robots.simulators.tabletop import Tabletop
simulator = Tabletop()
simulator.reset(0)
print(any(simulator.step(simulator.expert_action()).success for _ in range(100)))
try:
    simulator.render(64)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize("missing", ["library", "driver"])
def test_tabletop_without_egl_simulates_and_reports_that_it_cannot_render(tmp_path, missing):
    environment = {name: value for name, value in os.environ.items() if name != "MUJOCO_GL"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    if missing == "library":
        (tmp_path / "OpenGL").mkdir()
        (tmp_path / "OpenGL" / "__init__.py").write_text("raise AttributeError('no library of EGL')")
        environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *sys.path])
    else:
        environment["__EGL_VENDOR_LIBRARY_DIRS"] = str(tmp_path)
    ended = subprocess.run(
        [sys.executable, "-c", NO_EGL], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    succeeded, message = ended.stdout.splitlines()
    assert succeeded == "True"
    assert message.startswith("MuJoCo cannot render here")
    assert ended.stderr == ""


@pytest.mark.parametrize(("task", "count"), [("around", 1), ("touch", 3), ("push", 12)])
def test_tabletop_instructions_list_every_possible_one(task, count):
    with contextlib.closing(Tabletop(task=task)) as tabletop:
        assert len(set(tabletop.instructions)) == count
        for seed in range(20):
            tabletop.reset(seed)
            assert tabletop.instruction in tabletop.instructions
