import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foundry.models.transformer import Transformer
from foundry.tasks.post_training.objectives.dpo import DPO, pair_losses
from foundry.tasks.post_training.schemas.objective import PreferenceLoss

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
def test_dpo_pair_loss_starts_at_ln_2(beta):
    log_prob, _, num_tokens, is_valid = pairs()
    loss = pair_losses(log_prob, log_prob.detach(), num_tokens, is_valid, ref_policy_kl_penalty=beta).loss
    torch.testing.assert_close(loss, torch.full_like(loss, math.log(2)))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@settings(deadline=None)
@given(cut=st.integers(0, 5), seed=st.integers(0, 50))
def test_dpo_losses_of_pairs_are_independent(options, cut, seed):
    inputs = pairs(seed=seed)
    parts = [pair_losses(*(t[rows] for t in inputs), **options) for rows in (slice(cut), slice(cut, None))]
    whole = pair_losses(*inputs, **options)
    for name in ("loss", "preference", "sft", "rewards"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rubbish", [math.nan, -math.inf])
def test_invalid_dpo_pairs_have_zero_loss_and_gradient(options, rubbish):
    log_prob, reference, num_tokens, _ = pairs(3)
    log_prob = torch.cat([log_prob.detach()[:2], torch.full((1, 2), rubbish)]).requires_grad_()
    is_valid = torch.tensor([True, False, False])
    ours = pair_losses(log_prob, reference, num_tokens, is_valid, **options)
    assert ours.loss[1:].tolist() == [0, 0]
    (gradient,) = torch.autograd.grad(ours.loss.sum(), log_prob)
    assert gradient[0].any()
    assert not gradient[1:].any()


def test_dpo_losses_match_their_formulas():
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


def make_model(seed=0):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
    return Transformer(vocab_size=50, max_seq_len=12, init_std=0.3, **sizes)


def microbatch(count=5, seq=10, seed=0):
    """Return pairs whose responses differ in length, padded."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(50, (count, 2, seq + 1), generator=generator)
    start = torch.randint(0, 4, (count, 1, 1), generator=generator)
    end = torch.randint(5, seq + 1, (count, 2, 1), generator=generator)
    places = torch.arange(seq)
    targets = tokens[..., 1:].masked_fill((places < start) | (places >= end), -100)
    return {"tokens": tokens[..., :-1], "targets": targets, "position": torch.arange(count)}


def objective_of(model, reference, **options):
    objective = DPO(**options)
    assert objective.frozen_models == {"reference": None}
    objective.compare({"reference": reference.eval().requires_grad_(False)})
    return objective


def loss_and_gradients(objective, model, parts):
    model.zero_grad()
    loss = sum(objective.loss(model, part).loss for part in parts)
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("averaged", [False, True])
def test_dpo_starts_at_ln_2_with_zero_margin(averaged):
    model, part = make_model(), microbatch()
    objective = objective_of(model, copy.deepcopy(model), preference_average_log_probs=averaged)
    result = objective.loss(model, part)
    assert result.loss.item() / objective.num_valid(part) == pytest.approx(math.log(2), abs=1e-6)
    assert result.metrics["margin"].sum == 0
    assert set(result.metrics) == set(objective.metrics)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@settings(max_examples=5, deadline=None)
@given(cut=st.integers(1, 4), seed=st.integers(0, 20))
def test_dpo_gradients_do_not_depend_on_microbatches(options, cut, seed):
    model, whole = make_model(), microbatch(seed=seed)
    objective = objective_of(model, make_model(1), **options)
    parts = [{name: value[rows] for name, value in whole.items()} for rows in (slice(cut), slice(cut, None))]
    ours, theirs = (loss_and_gradients(objective, model, cuts) for cuts in (parts, [whole]))
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-6)
    largest = max(1.0, max(gradient.abs().max().item() for gradient in theirs[1]))
    for a, b in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6 * largest)
    assert sum(map(objective.num_valid, parts)) == objective.num_valid(whole) == 5


def test_dpo_loss_is_the_weighted_sum_of_preference_and_sft_loss():
    model, part = make_model(), microbatch()

    def loss(**options):
        return objective_of(model, make_model(1), **options).loss(model, part).loss

    preference, both = loss(), loss(sft_loss_weight=1.0)
    weighted = loss(preference_loss_weight=0.25, sft_loss_weight=0.5)
    torch.testing.assert_close(weighted, 0.25 * preference + 0.5 * (both - preference))


@pytest.mark.parametrize("averages", [False, True])
def test_dpo_log_probs_are_summed_or_averaged_over_response_tokens(averages):
    part, num_tokens = microbatch(), (microbatch()["targets"] != -100).sum(-1)
    log_prob, reference = (objective_of(None, make_model(seed)).precompute(part)["reference"] for seed in (0, 1))
    lengths = num_tokens if averages else torch.ones_like(num_tokens)
    ratios = (log_prob - reference) / lengths
    options = {"preference_average_log_probs": averages, "sft_average_log_probs": averages, "sft_loss_weight": 0.5}
    found = objective_of(None, make_model(1), **options).loss(make_model(0), part)
    preference = -(0.05 * (ratios[:, 0] - ratios[:, 1])).sigmoid().log().sum()
    likelihood = -(log_prob / lengths)[:, 0].sum()
    assert found.metrics["preference_loss"].sum.item() == pytest.approx(preference.item(), rel=1e-6)
    assert found.metrics["sft_loss"].sum.item() == pytest.approx(likelihood.item(), rel=1e-6)
    assert found.loss.item() == pytest.approx((preference + 0.5 * likelihood).item(), rel=1e-6)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_dpo_microbatch_loss_is_the_sum_of_its_pair_losses(options):
    part = microbatch()
    log_prob, reference = (objective_of(None, make_model(seed)).precompute(part)["reference"] for seed in (0, 1))
    is_valid, num_tokens = torch.ones(5, dtype=torch.bool), (part["targets"] != -100).sum(-1)
    found = objective_of(None, make_model(1), **options).loss(make_model(0), part).loss
    expected = pair_losses(log_prob, reference, num_tokens, is_valid, **options).loss.sum()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


def test_padding_and_empty_responses_are_ignored_by_dpo():
    model, part = make_model(), microbatch()
    objective = objective_of(model, make_model(1), sft_loss_weight=0.5)
    wider = {name: torch.cat([value, value[:2]]) for name, value in part.items()}
    wider["position"][5] = -1
    wider["targets"][6, 0] = -100
    assert objective.num_valid(wider) == objective.num_valid(part) == 5
    torch.testing.assert_close(objective.loss(model, wider).loss, objective.loss(model, part).loss)
    nothing = {**part, "position": torch.full((5,), -1)}
    loss, gradients = loss_and_gradients(objective, model, [nothing])
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients)


def test_dpo_training_raises_the_margin_and_accuracy():
    model, part = make_model(), microbatch()
    objective = objective_of(model, copy.deepcopy(model), ref_policy_kl_penalty=0.1, sft_loss_weight=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(20):
        optimizer.zero_grad()
        objective.loss(model, part).loss.backward()
        optimizer.step()
    metrics = objective.loss(model, part).metrics
    assert metrics["accuracy"].sum == 5
    assert metrics["preference_loss"].sum / 5 < 0.5
    assert metrics["margin"].sum > 0
