import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foundry.tasks.post_training.objectives.advantages import group_advantages, penalized_rewards

REWARDS = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=24)


def groups_of(rewards, size):
    return torch.arange(len(rewards)) // size


@settings(deadline=None)
@given(rewards=REWARDS, size=st.integers(2, 6), rloo=st.booleans(), normalize=st.booleans(), shift=st.integers(-8, 8))
def test_advantages_are_invariant_to_a_shift_of_all_rewards(rewards, size, rloo, normalize, shift):
    # Multiples of 1/8 avoid rounding in the shift.
    rewards = (torch.tensor(rewards, dtype=torch.float64) * 8).round() / 8
    options = {"use_rloo": rloo, "normalize_rewards": normalize}
    before = group_advantages(rewards, groups_of(rewards, size), **options)
    after = group_advantages(rewards + shift, groups_of(rewards, size), **options)
    torch.testing.assert_close(after.advantage, before.advantage, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(after.baseline, before.baseline + shift)


@settings(deadline=None)
@given(rewards=REWARDS, size=st.integers(1, 6))
def test_unnormalized_advantages_of_a_group_sum_to_zero(rewards, size):
    groups = groups_of(rewards, size)
    advantage = group_advantages(torch.tensor(rewards).double(), groups, normalize_rewards=False).advantage
    sums = torch.zeros(int(groups.max()) + 1, dtype=torch.float64).index_add(0, groups, advantage)
    torch.testing.assert_close(sums, torch.zeros_like(sums), rtol=0, atol=1e-9)


@settings(deadline=None)
@given(
    common=st.floats(-1e4, 1e4, width=32),
    other=st.floats(-1e4, 1e4, width=32),
    size=st.integers(3, 16),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_equal_rewards_are_not_divided_by_their_zero_std(common, other, size, dtype):
    rewards = torch.full((size,), common, dtype=dtype)
    rewards[0] = other
    ours = group_advantages(rewards, torch.zeros(size, dtype=torch.int64))
    assert ours.std[0] == 0
    assert ours.advantage[0].item() == pytest.approx(float(rewards[0]) - float(rewards[1]), rel=1e-6)
    assert ours.advantage.abs().max() <= 2 * max(abs(other - common), 1)


def test_rounding_errors_of_equal_rewards_count_as_zero_std():
    rewards = torch.tensor([1.0, 0.1 + 0.2, 0.3, 0.3], dtype=torch.float64)
    assert group_advantages(rewards, torch.zeros(4, dtype=torch.int64)).advantage[0] == pytest.approx(0.7)


@pytest.mark.parametrize("rloo", [True, False])
def test_completions_without_a_reward_are_excluded_from_advantages(rloo):
    rewards = torch.tensor([1.0, math.nan, 0.0, 0.5, math.nan, 3.0])
    groups = torch.tensor([7, 7, 7, 7, 2, 2])
    ours = group_advantages(rewards, groups, use_rloo=rloo).advantage
    rest = group_advantages(rewards[[0, 2, 3]], groups[[0, 2, 3]], use_rloo=rloo).advantage
    assert ours[[0, 2, 3]].tolist() == rest.tolist()
    assert ours[[1, 4, 5]].tolist() == [0, 0, 0], "nothing to be compared with"


def test_advantages_do_not_depend_on_the_order_of_completions():
    rewards, groups = torch.rand(12), torch.arange(12) % 3
    order = torch.randperm(12)
    ours, shuffled = group_advantages(rewards, groups), group_advantages(rewards[order], groups[order])
    torch.testing.assert_close(shuffled.advantage, ours.advantage[order])


def test_kl_penalty_in_the_reward_sums_over_completion_tokens():
    kl, mask = (
        torch.tensor([[0.5, 0.25, 9.0], [1.0, 9.0, 9.0]]),
        torch.tensor([[True, True, False], [True, False, False]]),
    )
    assert penalized_rewards(torch.tensor([1.0, 0.0]), kl, mask, 0.2).tolist() == pytest.approx([0.85, -0.2])
