import pytest
from support.composition import configure
from support.reach import Reach

from foundry.core.errors import ConfigError
from foundry.parts.data import build_simulator


def build(**settings):
    return build_simulator({"_target_": "support.reach.Reach", **settings})


def test_nothing_is_simulated_by_default():
    assert build_simulator(configure().simulator) is None


def test_a_simulator_of_ones_own_is_built_from_its_settings():
    simulator = build(state_dim=4, action_dim=2, max_steps=5)
    assert isinstance(simulator, Reach)
    assert simulator.max_steps == 5


class Small(Reach):
    """It need not take the sizes that the configuration states."""

    def __init__(self):
        super().__init__()


def test_sizes_are_compared_with_what_was_built():
    target = f"{Small.__module__}.Small"
    assert isinstance(build(_target_=target, state_dim=4, action_dim=2), Reach)
    with pytest.raises(ConfigError) as refused:
        build(_target_=target, state_dim=7, action_dim=3)
    assert str(refused.value).splitlines() == [
        "simulator.state_dim: is 7 but Small has 4; set it to that",
        "simulator.action_dim: is 3 but Small has 2; set it to that",
    ]
