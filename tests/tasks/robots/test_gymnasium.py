import importlib.metadata
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from support.composition import compose, configure
from support.examples import some_of

from foundry.config.packages import pip_command
from foundry.core.errors import ConfigError
from foundry.core.simulator import Demonstrating
from foundry.parts.data import build_simulator

if find_spec("gymnasium_robotics") is None:
    pytest.skip("needs the extra fetch", allow_module_level=True)

OWN = ("simulator=gymnasium", "simulator.state_dim=1", "simulator.action_dim=1")
LINE = (*OWN, "simulator.import_module=own_environments", "simulator.id=Line-v0", "simulator.max_steps=20")


@pytest.fixture(autouse=True)
def own_environments(monkeypatch, request):
    monkeypatch.syspath_prepend(request.path.parent)


def episode(simulator, seed):
    states = [simulator.reset(seed)["state"]]
    while True:
        observation, success, ended = simulator.step(simulator.expert_action())
        states.append(observation["state"])
        if success or ended:
            return np.array(states), success


@pytest.fixture(scope="module", params=some_of(["fetch_push", "fetch_pick_and_place"], "fetch_push"))
def fetch(request):
    simulator = build_simulator(configure(f"simulator={request.param}").simulator)
    yield simulator
    simulator.close()


@pytest.mark.long
def test_fetch_experts_succeed(fetch):
    assert isinstance(fetch, Demonstrating)
    assert np.mean([episode(fetch, seed)[1] for seed in range(100)]) >= 0.99


def test_fetch_episode_depends_on_its_seed_only(fetch):
    first, _ = episode(fetch, 2**33)
    other, _ = episode(fetch, 1)
    again, _ = episode(fetch, 2**33)
    np.testing.assert_array_equal(again, first)
    assert not np.array_equal(other[0], first[0])


@pytest.mark.egl
def test_fetch_observation_includes_goal_and_image():
    simulator = build_simulator(configure("simulator=fetch_push", "simulator.image_size=40").simulator)
    observation = simulator.reset(3)
    goal = simulator._env.unwrapped.goal
    np.testing.assert_allclose(observation["state"][-3:], goal, rtol=1e-6)
    assert observation["image"].shape == (40, 40, 3)
    assert observation["image"].std() > 10
    assert (simulator.fps, simulator.instruction) == (25, "push the block to the goal")
    simulator.close()
    simulator.close()


def test_custom_gymnasium_environment_is_built_with_expert_and_image():
    simulator = build_simulator(
        configure(*LINE, "simulator.expert=own_environments.expert", "simulator.image_size=8").simulator
    )
    assert isinstance(simulator, Demonstrating)
    assert all(episode(simulator, seed)[1] for seed in range(10))
    assert (simulator.fps, simulator.action_dim, simulator.state_dim) == (5, 1, 1)
    image = simulator.reset(0)["image"]
    assert image[:, :4].max() == 0, "of a wide picture the middle"
    assert image[:, 4:].min() == 255


def test_simulator_without_an_expert_is_not_demonstrating():
    simulator = build_simulator(configure(*LINE).simulator)
    assert not isinstance(simulator, Demonstrating)
    simulator.reset(0)
    assert [simulator.step(np.ones(1)).ended for _ in range(20)] == [False] * 19 + [True]


def test_success_reward_replaces_missing_success_info():
    silent = (*LINE, "+simulator.kwargs.reports_success=false", "simulator.expert=own_environments.expert")
    with pytest.raises(ConfigError) as refused:
        build_simulator(configure(*silent).simulator)
    assert str(refused.value).startswith("simulator.success_reward: is null but info of Line-v0 has neither is_success")
    simulator = build_simulator(configure(*silent, "simulator.success_reward=1").simulator)
    assert all(episode(simulator, seed)[1] for seed in range(10))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("simulator.state_dim=5",), "simulator.state_dim: is 5 but Gymnasium has 1; set it to that"),
        (("simulator.action_dim=2",), "simulator.action_dim: is 2 but Gymnasium has 1; set it to that"),
        (("simulator.id=Buttons-v0",), "simulator.id: is Buttons-v0, whose actions are Discrete(3)"),
        (("simulator.id=Mapping-v0",), "simulator.id: is Mapping-v0, whose observation has left, right; wrap it"),
        (("simulator.id=Broken-v0",), "simulator.id: is Broken-v0, which cannot be created: no arm.xml"),
        (("simulator.id=Lime-v0",), "simulator.id: is Lime-v0, which cannot be created"),
        (("simulator.expert=own_environments.missing",), "simulator.expert: is own_environments.missing"),
    ],
)
def test_invalid_gymnasium_settings_are_config_errors(overrides, message):
    with pytest.raises(ConfigError) as refused:
        build_simulator(configure(*LINE, *overrides).simulator)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def refusal(*overrides):
    with pytest.raises(ConfigError) as refused:
        compose(*overrides)
    return str(refused.value)


def test_missing_simulator_packages_name_the_extra(monkeypatch):
    composed = configure("simulator=fetch_push")
    monkeypatch.setitem(sys.modules, "gymnasium_robotics", None)
    message = (
        f"simulator: needs gymnasium_robotics, which is not installed; {pip_command('gymnasium_robotics', 'fetch')}"
    )
    assert refusal("simulator=fetch_push") == message
    with pytest.raises(ConfigError) as refused:
        build_simulator(composed.simulator)
    assert str(refused.value) == message
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    message = f"simulator: needs gymnasium, which is not installed; {pip_command('gymnasium', 'robot')}"
    assert refusal(*OWN, "simulator.id=CartPole-v1") == message
    monkeypatch.setitem(sys.modules, "metaworld", None)
    message = f"simulator: needs metaworld, which is not installed; {pip_command('metaworld', 'metaworld')}"
    assert refusal("simulator=metaworld").startswith(message)


def test_missing_import_module_is_refused():
    message = refusal(*OWN, "simulator.id=X-v0", "simulator.import_module=no_such_module")
    assert message.startswith("simulator.import_module: is no_such_module, which does not exist")


@pytest.mark.parametrize(("mujoco", "is_wrong"), [("3.11.9", False), ("3.12.0", True), ("4.0.0", True)])
def test_fetch_with_a_newer_mujoco_names_the_pin(monkeypatch, mujoco, is_wrong):
    installed = {"mujoco": mujoco, "gymnasium-robotics": "1.4.2"}
    monkeypatch.setattr("importlib.metadata.version", installed.__getitem__)
    if is_wrong:
        message = f"needs mujoco<3.12 for gymnasium-robotics 1.4.2, but {mujoco} is installed; "
        message += pip_command("mujoco<3.12", "fetch")
        assert refusal("simulator=fetch_push") == f"simulator: {message}"
    else:
        compose("simulator=fetch_push")


def test_newer_gymnasium_robotics_allows_a_newer_mujoco(monkeypatch):
    installed = {"mujoco": "4.0.0", "gymnasium-robotics": "1.5.0"}
    monkeypatch.setattr("importlib.metadata.version", installed.__getitem__)
    compose("simulator=fetch_push")


def test_installed_mujoco_is_supported_by_fetch():
    assert tuple(map(int, importlib.metadata.version("mujoco").split(".")))[:2] < (3, 12)
