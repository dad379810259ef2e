import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foundry.config.schemas.objective import PreferenceLoss
from foundry.objectives.dpo import pair_losses

OPTIONS = [
    {},
    {"loss_type": PreferenceLoss.ipo, "preference_average_log_probs": True},
    {"loss_type": PreferenceLoss.hinge, "label_smoothing": 0.2},
    {"label_smoothing": 0.1, "sft_loss_weight": 0.3},
    {"sft_loss_weight": 0.3, "sft_average_log_probs": True, "preference_average_log_probs": True},
]


def pairs(count=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    log_prob, reference = (-10 * torch.rand(count, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    num_tokens = torch.randint(1, 9, (count, 2), generator=generator)
    return log_prob.requires_grad_(), reference, num_tokens, torch.ones(count, dtype=torch.bool)


@pytest.mark.parametrize("beta", [0.01, 0.05, 2.0])
def test_at_the_start_the_loss_is_ln_2(beta):
    log_prob, _, num_tokens, is_valid = pairs()
    loss = pair_losses(log_prob, log_prob.detach(), num_tokens, is_valid, ref_policy_kl_penalty=beta).loss
    torch.testing.assert_close(loss, torch.full_like(loss, math.log(2)))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@settings(deadline=None)
@given(cut=st.integers(0, 5), seed=st.integers(0, 50))
def test_pairs_do_not_depend_on_each_other(options, cut, seed):
    inputs = pairs(seed=seed)
    parts = [pair_losses(*(t[rows] for t in inputs), **options) for rows in (slice(cut), slice(cut, None))]
    whole = pair_losses(*inputs, **options)
    for name in ("loss", "preference", "sft", "rewards"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rubbish", [math.nan, -math.inf])
def test_pairs_that_do_not_count_cost_exactly_0_and_keep_the_graph(options, rubbish):
    log_prob, reference, num_tokens, _ = pairs(3)
    log_prob = torch.cat([log_prob.detach()[:2], torch.full((1, 2), rubbish)]).requires_grad_()
    is_valid = torch.tensor([True, False, False])
    ours = pair_losses(log_prob, reference, num_tokens, is_valid, **options)
    assert ours.loss[1:].tolist() == [0, 0]
    (gradient,) = torch.autograd.grad(ours.loss.sum(), log_prob)
    assert gradient[0].any()
    assert not gradient[1:].any()


def test_margins_by_hand():
    log_prob, reference, num_tokens, is_valid = pairs()
    ratio = log_prob - reference
    margin = ratio[:, 0] - ratio[:, 1]

    def preference(kind, **options):
        return pair_losses(log_prob, reference, num_tokens, is_valid, loss_type=kind, **options).preference

    hinge = preference(PreferenceLoss.hinge, ref_policy_kl_penalty=0.5)
    torch.testing.assert_close(hinge, (1 - 0.5 * margin).clamp(min=0))
    ipo = preference(PreferenceLoss.ipo, ref_policy_kl_penalty=0.5)
    torch.testing.assert_close(ipo, (margin - 1).square())
    smooth = preference(PreferenceLoss.sigmoid, ref_policy_kl_penalty=0.5, label_smoothing=0.1)
    sigmoid = (0.5 * margin).sigmoid()
    torch.testing.assert_close(smooth, -0.9 * sigmoid.log() - 0.1 * (1 - sigmoid).log())
