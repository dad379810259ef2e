"""Filters and sampling of tokens."""

import math

import pytest
import torch
from support.devices import DEVICES, Operations, device_of

from foundry.generation.sampling import draw_tokens, filtered

LOGITS = torch.tensor([2.0, 1.0, 3.0, 3.0, -1.0, 0.5], dtype=torch.float64)


def kept(**filters):
    return torch.isfinite(filtered(LOGITS, **filters)).tolist()


def test_top_k_keeps_exactly_k_and_prefers_lower_ids_among_equals():
    assert kept(top_k=1) == [False, False, True, False, False, False]
    assert kept(top_k=3) == [True, False, True, True, False, False]
    assert kept(top_k=6) == kept(top_k=60) == [True] * 6


def test_top_p_keeps_the_smallest_sufficient_set_and_at_least_one():
    probabilities = LOGITS.softmax(-1)
    two = float(probabilities[2] + probabilities[3])
    assert kept(top_p=two - 1e-9) == [False, False, True, True, False, False]
    assert kept(top_p=two + 1e-9) == [True, False, True, True, False, False]
    assert kept(top_p=1e-9) == [False, False, True, False, False, False]
    assert kept(top_p=1.0) == [True] * 6


def test_filters_apply_temperature_then_top_k_then_top_p():
    # At T = 1/2 the two likeliest tokens have probability 0.46 each before top-k, and 0.5 each after it.
    assert kept(temperature=0.5, top_k=2, top_p=0.5) == [False, False, True, False, False, False]
    assert torch.equal(filtered(LOGITS, temperature=0.5)[:2], LOGITS[:2] * 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_filters_keep_the_dtype_and_pass_gradients_to_kept_tokens(dtype):
    logits = LOGITS.to(dtype).expand(2, 3, 6).clone().requires_grad_()
    result = filtered(logits, temperature=0.7, top_k=4, top_p=0.9)
    assert (result.dtype, result.shape) == (dtype, (2, 3, 6))
    assert (result > -math.inf).sum() == 2 * 3 * 3
    result[result > -math.inf].sum().backward()
    assert (logits.grad != 0).sum() == 2 * 3 * 3


def test_sampled_tokens_follow_the_filtered_distribution():
    uniforms = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    logits = filtered(LOGITS, top_k=4)
    counts = torch.bincount(draw_tokens(logits.expand(10_000, 6), uniforms), minlength=6) / 10_000
    torch.testing.assert_close(counts.double(), logits.softmax(-1), atol=2e-4, rtol=0)
    assert counts[4] == counts[5] == 0
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert draw_tokens(logits.expand(2, 6), ends).tolist() == [0, 3]


def test_largest_uniform_does_not_sample_a_filtered_token():
    """Rounding makes the total of the probabilities inexact, and the largest double below 1 is close to it."""
    largest = torch.full((6,), 1 - 2**-53, dtype=torch.float64)
    for kind in (torch.float32, torch.float64):
        logits = 3 * torch.randn(6, 50_000, dtype=kind, generator=torch.Generator().manual_seed(0))
        logits[:, 40_000:] = -torch.inf
        logits[:, 39_999] = 20.0
        assert draw_tokens(logits, largest).tolist() == [39_999] * 6
        assert draw_tokens(logits.flip(1), torch.zeros_like(largest)).tolist() == [10_000] * 6
        assert draw_tokens(logits.flip(1), largest).max() < 50_000


@pytest.mark.parametrize("device", DEVICES)
def test_deterministic_sampling_on_a_device_matches_the_cpu(device):
    """CUDA sums floats in varying order, so a deterministic `cumsum` of floats is refused or slow there."""
    logits = 3 * torch.randn(16, 5000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    uniforms = torch.rand(16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = draw_tokens(filtered(logits, top_p=0.9), uniforms)
    torch.use_deterministic_algorithms(True)
    try:
        with Operations() as operations:
            kept = filtered(logits.to(device_of(device)), top_p=0.9)
            drawn = draw_tokens(kept, uniforms)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(kept.cpu(), filtered(logits, top_p=0.9))
    assert torch.equal(drawn.cpu(), expected)
    summed = [kind for name, kind in operations.seen if "cumsum" in name]
    assert len(summed) == 2
    assert not any(kind.is_floating_point for kind in summed)
