from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.divergences import divergence

from foundry.tasks.post_training.schemas.distillation import Divergence, OutsideTopK

SOUND = [OutsideTopK.tail, OutsideTopK.renormalize]


def logits(*shape, seed=0, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(scale * torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(2))


@pytest.mark.parametrize("kind", list(Divergence))
@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("outside", SOUND)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 100), temperature=st.floats(0.5, 4))
def test_divergence_is_nonnegative_and_zero_for_equal_logits(kind, top_k, outside, seed, temperature):
    student, teacher = logits(4, 9, seed=seed)
    options = {"divergence": kind, "top_k": top_k, "outside_top_k": outside, "temperature": temperature}
    assert bool((divergence(student, teacher, **options) > -1e-12).all())
    equal = divergence(teacher.requires_grad_(), teacher.detach() + 5, **options)
    torch.testing.assert_close(equal, torch.zeros_like(equal), rtol=0, atol=1e-12)
    (gradient,) = torch.autograd.grad(equal.sum(), teacher)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", list(Divergence))
def test_top_k_divergence_with_tail_grows_to_the_full_divergence(kind):
    student, teacher = logits(20, 9)
    values = [divergence(student, teacher, divergence=kind, top_k=k) for k in range(1, 10)]
    for less, more in pairwise(values):
        assert bool((less <= more + 1e-12).all()), "merging tokens can only lose information"
    torch.testing.assert_close(values[-2], divergence(student, teacher, divergence=kind))
    torch.testing.assert_close(values[-1], divergence(student, teacher, divergence=kind))


def test_tail_divergence_includes_tokens_that_renormalizing_ignores():
    teacher = torch.tensor([5.0, 4.0, -9.0, -9.0]).double()
    student = torch.tensor([5.0, 4.0, 9.0, 9.0]).double()
    assert divergence(student, teacher, top_k=2, outside_top_k=OutsideTopK.renormalize) < 1e-6
    assert divergence(student, teacher, top_k=2) > 4


@pytest.mark.parametrize("kind", list(Divergence))
@settings(deadline=None)
@given(chunk=st.integers(1, 12))
def test_divergence_does_not_depend_on_chunks(kind, chunk):
    student, teacher = logits(12, 7)
    parts = zip(student.split(chunk), teacher.split(chunk), strict=True)
    torch.testing.assert_close(
        torch.cat([divergence(*part, divergence=kind, top_k=4) for part in parts]),
        divergence(student, teacher, divergence=kind, top_k=4),
    )


def test_divergences_match_their_formulas():
    student, teacher = logits(3, 5)
    s, t = student.softmax(-1), teacher.softmax(-1)
    forward, reverse = (t * (t / s).log()).sum(-1), (s * (s / t).log()).sum(-1)
    torch.testing.assert_close(divergence(student, teacher), forward)
    torch.testing.assert_close(divergence(student, teacher, divergence=Divergence.reverse), reverse)
    mixed = divergence(student, teacher, divergence=Divergence.mixed, mixed_kl_weight=0.3)
    torch.testing.assert_close(mixed, 0.3 * forward + 0.7 * reverse)
    m = 0.2 * t + 0.8 * s
    jsd = 0.2 * (t * (t / m).log()).sum(-1) + 0.8 * (s * (s / m).log()).sum(-1)
    torch.testing.assert_close(divergence(student, teacher, divergence=Divergence.jsd, jsd_beta=0.2), jsd)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_divergence_keeps_the_dtype(dtype):
    student, teacher = (value.to(dtype) for value in logits(3, 5))
    assert divergence(student, teacher, divergence=Divergence.jsd, top_k=2).dtype == dtype
