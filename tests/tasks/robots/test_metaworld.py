from importlib.util import find_spec

import numpy as np
import pytest

from foundry.core.errors import ConfigError
from foundry.core.simulator import Demonstrating

if find_spec("metaworld") is None:
    pytest.skip("needs the extra metaworld, which pins an older MuJoCo", allow_module_level=True)

from foundry.tasks.robots.simulators.metaworld import MetaWorld


@pytest.fixture(scope="module")
def reach():
    return MetaWorld(task="reach-v3")


def episode(simulator, seed):
    states = [simulator.reset(seed)["state"]]
    while True:
        observation, success, ended = simulator.step(simulator.expert_action())
        states.append(observation["state"])
        if success or ended:
            return np.array(states), success


@pytest.mark.parametrize("task", ["reach-v3", "push-v3", "pick-place-v3"])
def test_metaworld_experts_succeed(task):
    simulator = MetaWorld(task=task)
    assert isinstance(simulator, Demonstrating)
    assert np.mean([episode(simulator, seed)[1] for seed in range(20)]) >= 0.95


def test_metaworld_episode_depends_on_its_seed_only(reach):
    first, _ = episode(reach, 2**33)
    other, _ = episode(reach, 1)
    again, _ = episode(reach, 2**33)
    fresh, _ = episode(MetaWorld(task="reach-v3"), 2**33)
    np.testing.assert_array_equal(again, first)
    np.testing.assert_array_equal(fresh, first)
    assert not np.array_equal(other[0], first[0])


@pytest.mark.egl
def test_metaworld_observation_and_episode_end():
    simulator = MetaWorld(task="drawer-open-v3", image_size=32, max_steps=3)
    observation = simulator.reset(0)
    assert observation["state"].shape == (simulator.state_dim,)
    assert observation["state"].dtype == np.float32
    assert observation["image"].shape == (32, 32, 3)
    assert observation["image"].std() > 10
    ends = [simulator.step(np.zeros(4)).ended for _ in range(3)]
    assert ends == [False, False, True]
    assert (simulator.fps, simulator.instruction) == (80, "drawer open")
    simulator.close()
    simulator.close()


def test_misspelled_metaworld_task_is_a_config_error():
    with pytest.raises(ConfigError, match=r"simulator\.task: is pick-plce-v3, but .* did you mean pick-place-v3"):
        MetaWorld(task="pick-plce-v3")
