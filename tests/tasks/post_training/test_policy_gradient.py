import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foundry.tasks.post_training.objectives.kl import kl_estimate
from foundry.tasks.post_training.objectives.policy_gradient import (
    Completions,
    policy_loss,
    positive_example_nll,
    sampling_mismatch,
)
from foundry.tasks.post_training.schemas.policy import ImportanceWeights, KLGradient, KLType, PolicyGradient

NO_KL = {"ref_policy_kl_penalty": 0.0}
VARIANTS = [
    {},
    NO_KL,
    {"token_level_loss": False},
    {"token_level_loss": False, "sequence_level_importance_ratios": True, "use_importance_sampling_correction": True},
    {"use_cispo": True},
    {"disable_ppo_ratio": True},
    {"force_on_policy_ratio": True},
    {"ratio_clip_c": 3.0, "ratio_clip_max": 0.28},
    {"use_on_policy_kl_approximation": True, "kl_type": KLType.k2},
    {"kl_gradient": KLGradient.ratio},
    *(
        {
            "use_importance_sampling_correction": True,
            "importance_weights": kind,
            "importance_weight_min": 0.9,
            "importance_weight_max": 1.1,
        }
        for kind in ImportanceWeights
    ),
]


def completions(rows=5, tokens=6, seed=0, padding=0.0):
    """Return completions of different lengths; `padding` fills the masked positions."""
    generator = torch.Generator().manual_seed(seed)

    def log_probs(near=None):
        noise = torch.randn(rows, tokens, generator=generator, dtype=torch.float64)
        return -noise.abs() - 0.1 if near is None else near + 0.3 * noise

    lengths = torch.randint(1, tokens + 1, (rows,), generator=generator)
    mask = torch.arange(tokens) < lengths[:, None]
    log_prob = log_probs()
    near = {name: log_probs(log_prob).masked_fill(~mask, padding) for name in ("old", "sampler", "reference")}
    advantage = torch.randn(rows, generator=generator, dtype=torch.float64)
    log_prob = log_prob.masked_fill(~mask, padding).requires_grad_()
    return Completions(log_prob=log_prob, mask=mask, advantage=advantage, **near)


def select(whole, rows):
    return Completions(**{name: value[rows] for name, value in vars(whole).items() if value is not None})


def loss_and_gradient(parts, leaf, config):
    loss = sum(policy_loss(part, config).loss for part in parts)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss, gradient


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@settings(max_examples=10, deadline=None)
@given(cut=st.integers(0, 5), seed=st.integers(0, 100))
def test_policy_loss_and_gradients_add_up_over_microbatches(variant, cut, seed):
    whole, config = completions(seed=seed), PolicyGradient(**variant)
    parts = [select(whole, slice(None, cut)), select(whole, slice(cut, None))]
    for ours, theirs in zip(
        loss_and_gradient(parts, whole.log_prob, config),
        loss_and_gradient([whole], whole.log_prob, config),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("padding", [-torch.inf, torch.nan, 1e4])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_masked_values_do_not_affect_the_policy_loss(variant, padding):
    whole, clean, config = completions(padding=padding), completions(), PolicyGradient(**variant)
    loss, gradient = loss_and_gradient([whole], whole.log_prob, config)
    expected = loss_and_gradient([clean], clean.log_prob, config)
    assert loss == expected[0]
    assert torch.equal(gradient, expected[1])
    assert bool((gradient[~whole.mask] == 0).all())


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_fully_masked_completions_have_zero_loss_and_gradient(variant):
    whole = completions()
    nothing = Completions(**{**vars(whole), "mask": torch.zeros_like(whole.mask)})
    loss, gradient = loss_and_gradient([nothing], whole.log_prob, PolicyGradient(**variant))
    assert loss == 0
    assert loss.requires_grad
    assert not gradient.any()


def test_filtered_token_counts_for_the_kl_only():
    whole = completions(rows=1, seed=3)
    cut = whole.log_prob.detach().clone()
    cut[0, 0] = -torch.inf
    filtered = Completions(**{**vars(whole), "log_prob": cut, "unfiltered": whole.log_prob})
    ours, theirs = (policy_loss(part, PolicyGradient()) for part in (filtered, whole))
    torch.testing.assert_close(ours.kl, theirs.kl)
    ratio = (whole.log_prob - whole.old)[0, 0].exp()
    first = torch.maximum(-whole.advantage * ratio, -whole.advantage * ratio.clamp(0.8, 1.2))
    torch.testing.assert_close(theirs.policy - ours.policy, first.squeeze(0))


def test_policy_loss_variants_match_their_formulas():
    part = completions(rows=1, seed=1)
    x, old, sampler, mask = part.log_prob, part.old, part.sampler, part.mask
    advantage, ratio, drift = part.advantage, (x - old).exp(), (old - sampler).exp()

    def policy(**options):
        return policy_loss(part, PolicyGradient(**NO_KL, **options)).policy

    clipped = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
    torch.testing.assert_close(policy(), clipped[mask].sum())
    torch.testing.assert_close(policy(disable_ppo_ratio=True), -(advantage * x)[mask].sum())
    torch.testing.assert_close(policy(force_on_policy_ratio=True), -advantage.sum() * mask.sum())
    torch.testing.assert_close(policy(use_cispo=True), -(ratio.clamp(0.8, 1.2) * advantage * x)[mask].sum())
    corrected = {"use_importance_sampling_correction": True, "importance_weight_min": 0.9, "importance_weight_max": 1.1}
    torch.testing.assert_close(policy(**corrected), (drift * clipped)[mask].sum())
    tis = policy(**corrected, importance_weights=ImportanceWeights.tis)
    torch.testing.assert_close(tis, (drift.clamp(0.9, 1.1) * clipped)[mask].sum())
    kept = mask & (drift >= 0.9) & (drift <= 1.1)
    assert 0 < kept.sum() < mask.sum(), "a case that says something"
    icepop = policy(**corrected, importance_weights=ImportanceWeights.icepop)
    torch.testing.assert_close(icepop, (drift * clipped)[kept].sum())
    mean = (old - sampler)[mask].mean().exp()
    for low, high, counts in ((mean * 0.99, mean * 1.01, 1), (mean * 1.01, mean * 1.02, 0)):
        bounds = {"importance_weight_min": low.item(), "importance_weight_max": high.item()}
        masked = policy(**{**corrected, **bounds}, importance_weights=ImportanceWeights.seq_mask)
        torch.testing.assert_close(masked, counts * (drift * clipped)[mask].sum())


@pytest.mark.parametrize("kl_type", list(KLType))
def test_kl_estimate_has_the_gradient_of_the_expectation(kl_type):
    """Over all tokens, k1 and k3 with the score-function gradient have the gradient of KL(policy ‖ reference)."""
    logits = torch.tensor([0.3, -0.4, 1.1, 0.2], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.2, 0.3, -0.5], dtype=torch.float64).log_softmax(-1)
    log_prob = logits.log_softmax(-1)
    probability = log_prob.exp().detach()
    estimate = kl_estimate(log_prob, reference, kl_type=kl_type, weights=(log_prob - log_prob.detach()).exp())
    (ours,) = torch.autograd.grad((probability * estimate).sum(), logits, retain_graph=True)
    exact = (log_prob.exp() * (log_prob - reference)).sum()
    (theirs,) = torch.autograd.grad(exact, logits)
    if kl_type is KLType.k2:
        assert not torch.allclose(ours, theirs), "it is biased"
    else:
        torch.testing.assert_close((probability * estimate).sum(), exact)
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("by_token", [True, False])
def test_on_policy_kl_is_weighted_by_policy_over_sampler(by_token):
    """ClippedPGLossFn of NeMo-RL: exp(policy - sampler), through which gradients flow, times the k3 estimate."""
    part = completions(seed=4)
    settings = PolicyGradient(use_on_policy_kl_approximation=True, ref_policy_kl_penalty=0.3, token_level_loss=by_token)
    ours = policy_loss(part, settings)
    expected = 0.0
    for row, length in enumerate(part.mask.sum(-1).tolist()):
        terms = []
        for token in range(length):
            log_prob = part.log_prob[row, token]
            weight = log_prob.exp() / part.sampler[row, token].exp()
            ratio = part.reference[row, token].exp() / log_prob.exp()
            terms.append(weight * (ratio - ratio.log() - 1))
        expected += sum(terms) if by_token else sum(terms) / length
    torch.testing.assert_close(ours.kl, expected)
    torch.testing.assert_close(ours.loss, ours.policy + 0.3 * expected)
    gradients = [torch.autograd.grad(kl, part.log_prob, retain_graph=True)[0] for kl in (ours.kl, expected)]
    torch.testing.assert_close(*gradients)
    assert ours.kl.item() != pytest.approx(policy_loss(part, PolicyGradient(token_level_loss=by_token)).kl.item())


def test_clamped_kl_has_no_gradient():
    log_prob = torch.tensor([-30.0, -1.0], requires_grad=True)
    estimate = kl_estimate(log_prob, torch.tensor([-1.0, -1.5]), weights=(log_prob - log_prob.detach()).exp())
    (gradient,) = torch.autograd.grad(estimate.sum(), log_prob)
    assert estimate[0] == 10
    assert gradient[0] == 0
    assert gradient[1] != 0


def test_positive_nll_covers_rewarded_completions_only():
    part = completions()
    rewards = torch.tensor([1.0, 0.0, -1.0, 0.5, 0.0])
    total, count = positive_example_nll(part.log_prob, part.mask, rewards)
    rows = torch.tensor([0, 3])
    torch.testing.assert_close(total, -part.log_prob[rows][part.mask[rows]].sum())
    assert count == part.mask[rows].sum()


def test_sampling_mismatch_is_zero_for_an_equal_sampler():
    part = completions()
    ours = sampling_mismatch(part.log_prob, part.old, part.old, part.mask)
    assert ours["mult_prob_error"] == part.mask.sum()
    for name in ("sampler_kl", "trainer_kl", "js_divergence"):
        assert ours[name].item() == pytest.approx(0, abs=1e-12)
