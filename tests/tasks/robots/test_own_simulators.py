import pytest
from support.composition import configure
from support.reach import Reach

from foundry.core.errors import ConfigError
from foundry.parts.data import build_simulator


def build(**settings):
    return build_simulator({"_target_": "support.reach.Reach", **settings})


def test_default_simulator_is_none():
    assert build_simulator(configure().simulator) is None


def test_custom_simulator_is_built_from_its_settings():
    simulator = build(state_dim=4, action_dim=2, max_steps=5)
    assert isinstance(simulator, Reach)
    assert simulator.max_steps == 5


class Small(Reach):
    """A simulator that does not accept the configured sizes."""

    def __init__(self):
        super().__init__()


def test_sizes_of_a_built_simulator_are_checked():
    target = f"{Small.__module__}.Small"
    assert isinstance(build(_target_=target, state_dim=4, action_dim=2), Reach)
    with pytest.raises(ConfigError) as refused:
        build(_target_=target, state_dim=7, action_dim=3)
    assert str(refused.value).splitlines() == [
        "simulator.state_dim: is 7 but Small has 4; set it to that",
        "simulator.action_dim: is 3 but Small has 2; set it to that",
    ]
