"""Random numbers that depend only on (seed, stream, position)."""

import pytest
import torch

from foundry.core.keyed_random import keyed_integers, keyed_normal, keyed_uniform

FUNCTIONS = [
    lambda seed, positions, stream: keyed_normal(seed, positions, (2, 3), stream=stream),
    lambda seed, positions, stream: keyed_uniform(seed, positions, stream=stream),
    lambda seed, positions, stream: keyed_integers(seed, positions, 2**40, stream=stream),
]


@pytest.mark.parametrize("draw", FUNCTIONS)
def test_keyed_numbers_do_not_depend_on_batch_composition(draw):
    whole = draw(7, torch.arange(16), "a")
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(draw(7, order, "a"), whole[order])
    assert torch.equal(torch.cat([draw(7, part, "a") for part in torch.arange(16).split(3)]), whole)


@pytest.mark.parametrize("draw", FUNCTIONS)
def test_keyed_numbers_depend_on_seed_stream_and_position(draw):
    positions = torch.tensor([-1, 0, 1, 2**40, 2**63 - 1])
    base = draw(7, positions, "a")
    assert len({tuple(row) for row in base.flatten(1).tolist()} if base.ndim > 1 else set(base.tolist())) == 5
    for other in (draw(8, positions, "a"), draw(7, positions, "b")):
        assert not torch.any(other == base)


def test_keyed_numbers_have_expected_shapes_dtypes_and_ranges():
    positions = torch.arange(1000)
    normal = keyed_normal(0, positions, (3, 8, 8), stream="a")
    uniform = keyed_uniform(0, positions, stream="a")
    integers = keyed_integers(0, positions, 10, stream="a")
    assert (normal.shape, normal.dtype) == ((1000, 3, 8, 8), torch.float32)
    assert (uniform.shape, uniform.dtype) == ((1000,), torch.float32)
    assert (integers.shape, integers.dtype) == ((1000,), torch.int64)
    assert 0 <= uniform.min() < 0.01 < 0.99 < uniform.max() < 1
    assert sorted(integers.unique().tolist()) == list(range(10))


def test_empty_batch_gives_an_empty_tensor():
    assert keyed_normal(0, torch.arange(0), (4,), stream="a").numel() == 0


def test_keyed_numbers_follow_their_distributions():
    from scipy import stats

    positions = torch.arange(20_000)
    normal = keyed_normal(0, positions, (4,), stream="a").flatten().double().numpy()
    assert stats.kstest(normal, "norm").pvalue > 1e-3
    assert stats.kstest(keyed_uniform(0, positions, stream="a").numpy(), "uniform").pvalue > 1e-3
    counts = keyed_integers(0, positions, 50, stream="a").bincount(minlength=50)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((0, 0, "a"), (0, 1, "a")),  # neighboring positions
        ((0, 0, "a"), (0, 0, "b")),  # streams
        ((0, 0, "a"), (1, 0, "a")),  # seeds
        ((0, 1, "a"), (1, 0, "a")),  # seed + position is not the key
    ],
)
def test_adjacent_seeds_streams_and_positions_are_uncorrelated(first, second):
    count = 20_000

    def numbers(seed, offset, stream):
        return keyed_normal(seed, torch.arange(count) + offset, (8,), stream=stream).double()

    correlation = (numbers(*first).T @ numbers(*second)) / count
    # 64 pairs, each N(0, 1/count) if independent; 5 standard deviations.
    assert correlation.abs().max() < 5 / count**0.5
