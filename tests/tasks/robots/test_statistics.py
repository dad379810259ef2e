"""Statistics of states and actions, and the normalization by them."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from support.examples import examples

from foundry.tasks.robots.data.statistics import Moments, Statistics

SHAPES = st.tuples(st.integers(1, 20), st.integers(1, 4))
NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32) | st.sampled_from([0.0, 1.0, 1.5, -(2.0**-20)])
FRAMES = SHAPES.flatmap(lambda shape: npst.arrays(np.float32, shape, elements=NUMBERS, fill=NUMBERS))


def test_moments_match_numpy_float64_over_several_slices():
    values = np.random.default_rng(0).normal(3, 2, (70_000, 3)).astype(np.float32)
    moments, exact = Moments.of(values), values.astype(np.float64)
    assert np.allclose(moments.mean, exact.mean(0), rtol=1e-12)
    assert np.allclose(moments.std, exact.std(0), rtol=1e-12)
    assert np.array_equal(moments.min, exact.min(0))
    assert np.array_equal(moments.max, exact.max(0))


def test_states_are_standardized_and_clipped_and_actions_scaled_to_one():
    state, actions = np.array([[0.0], [2.0]], np.float32), np.array([[-3.0], [1.0]], np.float32)
    statistics = Statistics.of(state, actions)
    assert statistics.normalise_state(np.array([[0.0], [2.0], [99.0], [-99.0]])).tolist() == [[-1], [1], [8], [-8]]
    assert statistics.normalise_actions(np.array([[-3.0], [-1.0], [1.0], [3.0]])).tolist() == [[-1], [0], [1], [2]]
    assert statistics.restore_actions(np.array([[-1.0], [0.0], [1.0]])).tolist() == [[-3], [-1], [1]]


def test_constant_dimension_is_centered_and_not_scaled():
    still = np.full((5, 1), 0.3, np.float32)
    statistics = Statistics.of(still, still)
    assert statistics.normalise_state(still).tolist() == statistics.normalise_actions(still).tolist() == [[0]] * 5
    assert statistics.normalise_state(still + 1) == pytest.approx(np.ones((5, 1)))
    assert statistics.restore_actions(np.zeros((1, 1))) == pytest.approx(still[:1])


@settings(max_examples=examples(200), deadline=None)
@given(FRAMES)
def test_normalization_is_finite_and_actions_are_restored(frames):
    statistics = Statistics.of(frames, frames)
    state, actions = statistics.normalise_state(frames), statistics.normalise_actions(frames)
    assert state.dtype == actions.dtype == np.float32
    assert np.abs(state).max() <= 8
    assert np.isfinite(actions).all()
    reach = np.abs(frames).max() + 1e-4
    assert np.allclose(statistics.restore_actions(actions), frames, rtol=1e-6, atol=1e-6 * reach)


@settings(max_examples=examples(100), deadline=None)
@given(FRAMES)
def test_statistics_file_is_bit_exact(frames):
    statistics = Statistics.of(frames, frames[:, :1])
    again = Statistics.from_json(statistics.to_json())
    for name in ("state", "actions"):
        for one, other in zip(*(vars(getattr(s, name)).values() for s in (statistics, again)), strict=True):
            assert one.dtype == other.dtype
            assert np.array_equal(one, other)


GOOD = json.loads(Statistics.of(np.eye(2), np.eye(2)).to_json())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "no JSON object"),
        ("{}", "state"),
        (json.dumps(GOOD | {"actions": {}}), "actions"),
        (json.dumps(GOOD | {"state": GOOD["state"] | {"std": [-1, 1]}}), "negative"),
        (json.dumps(GOOD | {"state": GOOD["state"] | {"max": [1]}}), "different lengths"),
        (json.dumps(GOOD | {"state": GOOD["state"] | {"max": [1, float("nan")]}}), "finite"),
        (json.dumps(GOOD | {"state": GOOD["state"] | {"max": [1, 10**400]}}), "state"),
        (json.dumps(GOOD | {"state": GOOD["state"] | {"max": ["1", "2"]}}), "not a number"),
    ],
)
def test_invalid_statistics_file_is_refused_with_the_reason(text, why):
    with pytest.raises(ValueError, match=why):
        Statistics.from_json(text)
