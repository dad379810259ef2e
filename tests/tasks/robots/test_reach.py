from support.reach import Reach

from foundry.core.simulator import Demonstrating


def test_reach_expert_reaches_the_goal():
    simulator = Reach()
    assert isinstance(simulator, Demonstrating)
    for seed in range(20):
        simulator.reset(seed)
        assert any(simulator.step(simulator.expert_action()).success for _ in range(simulator.max_steps))
