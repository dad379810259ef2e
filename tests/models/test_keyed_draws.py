"""Initial weights keyed by element: drawing a part gives that part of the whole tensor bit for bit; distributions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foundry.models.keyed_draws import Constant, Normal, Part, Uniform, draw_parts

BLOCK = 2**16


def drawn(draw, shape, *, seed=7, name="layer.weight", dtype=torch.float32):
    tensor = torch.full(shape, math.nan, dtype=dtype)
    draw_parts({name: draw}, {name: Part.from_tensor(tensor)}, seed)
    return tensor


@st.composite
def cut(draw):
    """Draw a shape and the bounds of a part of it, in each dimension."""
    longest = [400_000, 700, 70, 20][draw(st.integers(0, 3)) :]
    shape = [draw(st.integers(1, most)) for most in longest[:3]]
    first = [draw(st.integers(0, size - 1)) for size in shape]
    return shape, [(low, draw(st.integers(low, size))) for low, size in zip(first, shape, strict=True)]


@settings(max_examples=60, deadline=None)
@given(cut(), st.sampled_from([Normal(0.02), Normal(1.0, zero_row=3), Uniform(0.5), Constant(2.0)]))
def test_draw_of_any_part_equals_that_part_of_the_whole(cut, draw):
    shape, bounds = cut
    if math.prod(shape) > 2_000_000:
        shape = [1, *shape[1:]]
        bounds = [(0, 1), *bounds[1:]]
    part = torch.full([high - low for low, high in bounds], math.nan)
    draw_parts({"w": draw}, {"w": Part(part, tuple(shape), tuple(low for low, _ in bounds))}, seed=3)
    whole = drawn(draw, shape, seed=3, name="w")
    assert torch.equal(part, whole[tuple(slice(low, high) for low, high in bounds)])


def test_noncontiguous_parts_are_filled_in_place():
    whole = drawn(Normal(1.0), (300, 400))
    other = torch.zeros(400, 300).T
    draw_parts({"layer.weight": Normal(1.0)}, {"layer.weight": Part(other, (300, 400), (0, 0))}, seed=7)
    assert torch.equal(other, whole)


def test_normal_draws_are_box_muller_of_philox():
    """Compare with an independent computation in float64 of a little more than two blocks."""
    import hashlib

    key = np.frombuffer(hashlib.blake2b(b"7:layer.weight", digest_size=16).digest(), dtype="<u8")
    words = np.random.Philox(key=key, counter=0).random_raw(3 * BLOCK // 2).view(np.uint32).reshape(3, 2, BLOCK // 2)
    radius = np.sqrt(-2 * np.log(((words[:, 0] & 0x7FFFFFFF) + 0.5) / 2**31))
    angle = words[:, 1].view(np.int32) * (math.pi / 2**31)
    expected = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1).ravel()
    found = drawn(Normal(1.0), (2 * BLOCK + 99,)).double().numpy()
    np.testing.assert_allclose(found, expected[: len(found)], atol=2e-6)


@pytest.mark.parametrize("seed", [0, 42, 2**63])
def test_normal_draws_have_the_normal_distribution(seed):
    values = drawn(Normal(0.5), (1000, 1000), seed=seed).double().flatten() / 0.5
    count = len(values)
    for power, moment, error in ((1, 0, 1), (2, 1, math.sqrt(2)), (3, 0, math.sqrt(15)), (4, 3, math.sqrt(96))):
        assert abs((values**power).mean().item() - moment) < 5 * error / math.sqrt(count)
    # Kolmogorov distance from the normal distribution; 1.95 / √n is exceeded once in a thousand.
    ordered = values.sort().values
    expected = 0.5 * torch.erfc(-ordered / math.sqrt(2))
    distance = (expected - (torch.arange(count) + 0.5) / count).abs().max().item()
    assert distance < 1.95 / math.sqrt(count)
    for lag in (1, 2, 1000, BLOCK // 2, BLOCK):
        correlation = (values[:-lag] * values[lag:]).mean().item()
        assert abs(correlation) < 5 / math.sqrt(count - lag), lag
    assert 4.4 < values.abs().max() < 6.7


def test_uniform_draws_have_the_uniform_distribution():
    bound = Uniform.xavier(30, 50).bound
    assert bound == math.sqrt(6 / 80)
    values = drawn(Uniform(bound), (1000, 1000)).double().flatten() / bound
    assert -1 <= values.min() < -0.9999
    assert 0.9999 < values.max() <= 1
    assert abs(values.mean().item()) < 5 / math.sqrt(3e6)
    assert abs((values**2).mean().item() - 1 / 3) < 5 * math.sqrt(4 / 45) / 1000


def test_draws_of_different_seeds_and_names_are_independent():
    cases = [drawn(Normal(1.0), (500, 500), seed=s, name=n) for s, n in ((1, "a"), (2, "a"), (1, "b"), (12, ":a"))]
    for index, one in enumerate(cases):
        for other in cases[index + 1 :]:
            assert abs((one * other).double().mean().item()) < 5 / 500
            assert (one == other).sum() < 5


def test_std_dtype_and_padding_row_do_not_change_the_underlying_draw():
    plain = drawn(Normal(1.0), (30, 40))
    assert torch.equal(drawn(Normal(0.25), (30, 40)), plain * 0.25)
    assert torch.equal(drawn(Normal(1.0), (30, 40), dtype=torch.bfloat16), plain.bfloat16())
    padded = drawn(Normal(1.0, zero_row=4), (30, 40))
    assert not padded[4].any()
    plain[4] = 0
    assert torch.equal(padded, plain)


def test_names_without_a_draw_and_empty_parts_are_left_unchanged():
    kept, nothing = torch.ones(3), torch.empty(0, 5)
    draw_parts({"b": Normal(1.0)}, {"a": Part.from_tensor(kept), "b": Part(nothing, (2, 5), (2, 0))}, seed=0)
    assert torch.equal(kept, torch.ones(3))
