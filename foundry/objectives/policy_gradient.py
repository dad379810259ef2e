"""The clipped policy gradient of group-relative policy optimisation and its variants."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from foundry.config.schemas.policy import ImportanceWeights, KLGradient, PolicyGradient
from foundry.objectives.kl import kl_estimate


@dataclass(frozen=True, kw_only=True)
class Completions:
    """Completions as they were sampled and as the policy sees them now.

    Attributes:
        log_prob: (completions, tokens) under the policy that is trained, through the filters that sampled; -inf where
            a filter leaves a token out, which then only counts for the divergence.
        old: (completions, tokens) under the same policy at the rollout.
        sampler: (completions, tokens) as the sampler said.
        mask: (completions, tokens) bool, tokens that count; none of a completion that is left out.
        advantage: (completions,).
        reference: (completions, tokens) under the reference, unfiltered; None: without a divergence.
        unfiltered: (completions, tokens) under the policy without filters; None: `log_prob` has none.
    """

    log_prob: Tensor
    old: Tensor
    sampler: Tensor
    mask: Tensor
    advantage: Tensor
    reference: Tensor | None = None
    unfiltered: Tensor | None = None


@dataclass(frozen=True)
class PolicyLoss:
    """Sums over the tokens or, without `token_level_loss`, the completions of a microbatch; () of the inputs' dtype.

    Attributes:
        loss: policy + ref_policy_kl_penalty x kl, to be divided by the number of tokens or completions that count.
        policy: the clipped objective.
        kl: the divergence, 0 where it is no part of the loss.
        ratio: (completions, tokens) of the policy to itself at the rollout, without gradient.
        weight: (completions, tokens), what corrects for the sampler; 1 without such a correction.
        is_kept: (completions, tokens) bool, tokens whose policy term counts.
    """

    loss: Tensor
    policy: Tensor
    kl: Tensor
    ratio: Tensor
    weight: Tensor
    is_kept: Tensor


def policy_loss(completions: Completions, settings: PolicyGradient) -> PolicyLoss:
    """Sum the loss over completions (Shao et al., 2024; asymmetric clipping: Yu et al., 2025).

    Sources of variants: `ratio_clip_c` Ye et al., 2019; `sequence_level_importance_ratios` Zheng et al., 2025 (GSPO);
    `use_cispo` Chen et al., 2025.

    With the ratio ρ of the policy to itself at the rollout and the advantage A, a token costs
    max(-Aρ, -A clip(ρ, 1 - ratio_clip_min, 1 + ratio_clip_max)) plus the weighted divergence from the reference.
    """
    mask, s = completions.mask, settings
    is_kept = mask & completions.log_prob.isfinite() & completions.old.isfinite()
    # Where nothing counts there may be anything, which times 0 would be NaN in the backward pass.
    log_prob = completions.log_prob.masked_fill(~is_kept, 0.0)
    old = log_prob.detach() if s.force_on_policy_ratio else completions.old.masked_fill(~is_kept, 0.0)
    advantage = completions.advantage[:, None]
    ratio = _ratio(log_prob - old, is_kept, s.sequence_level_importance_ratios)
    policy = _clipped(log_prob, ratio, advantage, s)
    weight = _sampler_weights(old - completions.sampler.masked_fill(~is_kept, 0.0), is_kept, s)
    policy_sum = _reduced(weight * policy, is_kept, s.token_level_loss)
    kl_sum = policy_sum.new_zeros(())
    if s.ref_policy_kl_penalty > 0 and not s.use_kl_in_reward:
        kl_sum = _reduced(_divergence(completions, ratio, s), mask, s.token_level_loss)
    loss = policy_sum + s.ref_policy_kl_penalty * kl_sum
    return PolicyLoss(loss, policy_sum, kl_sum, ratio.detach(), weight, is_kept)


def positive_example_nll(log_prob: Tensor, mask: Tensor, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """The negative log-probability of completions with a reward above 0 (Yue et al., 2025, equation 10), and its count.

    Args:
        log_prob: (completions, tokens).
        mask: (completions, tokens) bool, tokens that count.
        rewards: (completions,).

    Returns:
        The sum over their tokens, and the number of these, () each.
    """
    is_positive = mask & (rewards > 0)[:, None]
    return -log_prob.masked_fill(~is_positive, 0.0).sum(), is_positive.sum()


@torch.no_grad()
def sampling_mismatch(log_prob: Tensor, old: Tensor, sampler: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """How far the sampler is from the trainer, as sums over the tokens that count, () each.

    Args:
        log_prob: (completions, tokens) under the policy that is trained.
        old: likewise under the same policy at the rollout.
        sampler: likewise as the sampler said.
        mask: (completions, tokens) bool, tokens that count.

    Returns:
        mult_prob_error: exp |old - sampler|, whose mean is 1 where both agree; above 1.02 something differs.
        sampler_kl, trainer_kl: k3 of the sampler from the trainer and the other way round.
        js_divergence: of both from their mean.
        entropy: of the policy, estimated by importance sampling.
    """
    log_prob, old, sampler = (values.masked_fill(~mask, 0.0) for values in (log_prob, old, sampler))
    mixture = torch.logaddexp(old, sampler) - math.log(2)

    def k3(values: Tensor, reference: Tensor) -> Tensor:
        return kl_estimate(values, reference, input_clamp=None, output_clamp=None)

    per_token = {
        "mult_prob_error": (old - sampler).abs().exp(),
        "sampler_kl": k3(sampler, old),
        "trainer_kl": k3(old, sampler),
        "js_divergence": (k3(mixture, old) + k3(mixture, sampler)) / 2,
        "entropy": -(log_prob - sampler).exp() * log_prob,
    }
    return {name: values.masked_fill(~mask, 0.0).sum() for name, values in per_token.items()}


def _ratio(log_ratio: Tensor, mask: Tensor, by_sequence: bool) -> Tensor:
    """(completions, tokens), the ratio of each token or the geometric mean of its completion's."""
    if by_sequence:
        log_ratio = (log_ratio.sum(-1, keepdim=True) / _lengths(mask)[:, None]).expand_as(log_ratio)
    return log_ratio.exp()


def _clipped(log_prob: Tensor, ratio: Tensor, advantage: Tensor, s: PolicyGradient) -> Tensor:
    """What each token costs, before the correction for the sampler."""
    clipped = ratio.clamp(1 - s.ratio_clip_min, 1 + s.ratio_clip_max)
    if s.use_cispo:
        loss = -advantage * clipped.detach() * log_prob
    elif s.force_on_policy_ratio:
        loss = -advantage * ratio
    elif s.disable_ppo_ratio:
        loss = -advantage * log_prob
    else:
        loss = torch.maximum(-advantage * ratio, -advantage * clipped)
    if s.ratio_clip_c is None:
        return loss
    return torch.where(advantage < 0, torch.minimum(loss, -advantage * s.ratio_clip_c), loss)


def _sampler_weights(log_ratio: Tensor, mask: Tensor, s: PolicyGradient) -> Tensor:
    """(completions, tokens), the trainer's probability over the sampler's at the rollout, within its bounds.

    Args:
        log_ratio: (completions, tokens), 0 where `mask` is False.
        mask: tokens that count.
        s: the settings.
    """
    if not s.use_importance_sampling_correction:
        return torch.ones_like(log_ratio)
    log_ratio = log_ratio.detach()
    low = 0.0 if s.importance_weight_min is None else s.importance_weight_min
    high = torch.inf if s.importance_weight_max is None else s.importance_weight_max
    total = log_ratio.sum(-1, keepdim=True)
    weight = (total.expand_as(log_ratio) if s.sequence_level_importance_ratios else log_ratio).exp()
    match s.importance_weights:
        case ImportanceWeights.plain:
            return weight
        case ImportanceWeights.tis:
            return weight.clamp(low, high)
        case ImportanceWeights.icepop:
            return weight.masked_fill((weight < low) | (weight > high), 0.0)
        case ImportanceWeights.seq_mask:
            mean = (total / _lengths(mask)[:, None]).exp()
            return weight.masked_fill((mean < low) | (mean > high), 0.0)


def _divergence(completions: Completions, ratio: Tensor, s: PolicyGradient) -> Tensor:
    """(completions, tokens), the estimate of the divergence from the reference, with its weight."""
    assert completions.reference is not None, "a divergence needs a reference"
    log_prob = completions.log_prob if completions.unfiltered is None else completions.unfiltered
    log_prob, reference = (t.masked_fill(~completions.mask, 0.0) for t in (log_prob, completions.reference))
    weights: Tensor | None = None
    if s.use_on_policy_kl_approximation:
        weights = (log_prob - completions.sampler.masked_fill(~completions.mask, 0.0)).exp()
    elif s.kl_gradient is KLGradient.score:
        weights = (log_prob - log_prob.detach()).exp()
    elif s.kl_gradient is KLGradient.ratio:
        weights = ratio
    return kl_estimate(
        log_prob,
        reference,
        kl_type=s.kl_type,
        input_clamp=s.kl_input_clamp,
        output_clamp=s.kl_output_clamp,
        weights=weights,
    )


def _reduced(values: Tensor, mask: Tensor, by_token: bool) -> Tensor:
    """The sum over tokens, or over completions of the mean of their tokens."""
    values = values.masked_fill(~mask, 0.0)
    return values.sum() if by_token else (values.sum(-1) / _lengths(mask)).sum()


def _lengths(mask: Tensor) -> Tensor:
    """(completions,), tokens that count, at least 1."""
    return mask.sum(-1).clamp(min=1)
