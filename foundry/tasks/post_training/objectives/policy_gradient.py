"""The clipped policy gradient of group-relative policy optimization and its variants."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from foundry.tasks.post_training.objectives.kl import kl_estimate
from foundry.tasks.post_training.schemas.policy import ImportanceWeights, KLGradient, PolicyGradient


@dataclass(frozen=True, kw_only=True)
class Completions:
    """Log-probabilities of completions, at sampling time and under the current policy.

    Attributes:
        log_prob: (completions, tokens) under the trained policy, after the sampling filters; -inf if a filter excludes
            the token, which then counts only for the KL divergence.
        old: (completions, tokens) under the same policy at the time of the rollout, after the sampling filters.
        sampler: (completions, tokens) as reported by the sampler.
        mask: (completions, tokens) bool, valid tokens; all False for an excluded completion.
        advantage: (completions,).
        reference: (completions, tokens) under the reference, unfiltered; None if there is no KL divergence.
        unfiltered: (completions, tokens) under the policy without filters; None if `log_prob` is unfiltered.
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
    """Sums over the tokens of a microbatch, or over its completions without `token_level_loss`.

    The sums are scalars in the dtype of the inputs.

    Attributes:
        loss: policy + ref_policy_kl_penalty x kl, to be divided by the number of valid tokens or completions.
        policy: the clipped policy loss, weighted by `weight`.
        kl: the KL divergence; 0 if it is not part of the loss.
        ratio: (completions, tokens), probability ratio of the policy to itself at the rollout, without gradient.
        weight: (completions, tokens), importance weight that corrects for the sampler; 1 without this correction.
        is_kept: (completions, tokens) bool, tokens that contribute to the policy term.
    """

    loss: Tensor
    policy: Tensor
    kl: Tensor
    ratio: Tensor
    weight: Tensor
    is_kept: Tensor


def policy_loss(completions: Completions, settings: PolicyGradient) -> PolicyLoss:
    """Return the sum of the loss over completions (Shao et al., 2024; asymmetric clipping: Yu et al., 2025).

    Sources of variants: `ratio_clip_c` Ye et al., 2019; `sequence_level_importance_ratios` Zheng et al., 2025 (GSPO);
    `use_cispo` Chen et al., 2025.

    With the ratio ρ of the policy to itself at the rollout and the advantage A, the default loss of a token is max(-Aρ,
    -A clip(ρ, 1 - ratio_clip_min, 1 + ratio_clip_max)) plus the weighted KL divergence from the reference.
    """
    mask, s = completions.mask, settings
    is_kept = mask & completions.log_prob.isfinite() & completions.old.isfinite()
    # Masked positions may hold any values, which would give NaN in the backward pass even when multiplied by 0.
    log_prob = completions.log_prob.masked_fill(~is_kept, 0.0)
    old = log_prob.detach() if s.force_on_policy_ratio else completions.old.masked_fill(~is_kept, 0.0)
    advantage = completions.advantage[:, None]
    ratio = _ratio(log_prob - old, is_kept, s.sequence_level_importance_ratios)
    policy = _clip_loss(log_prob, ratio, advantage, s)
    weight = _sampler_weights(old - completions.sampler.masked_fill(~is_kept, 0.0), is_kept, s)
    policy_sum = _reduce(weight * policy, is_kept, s.token_level_loss)
    kl_sum = policy_sum.new_zeros(())
    if s.ref_policy_kl_penalty > 0 and not s.use_kl_in_reward:
        kl_sum = _reduce(_divergence(completions, ratio, s), mask, s.token_level_loss)
    loss = policy_sum + s.ref_policy_kl_penalty * kl_sum
    return PolicyLoss(loss, policy_sum, kl_sum, ratio.detach(), weight, is_kept)


def positive_example_nll(log_prob: Tensor, mask: Tensor, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Return the negative log-likelihood of completions with a reward above 0 (Yue et al., 2025, equation 10).

    Args:
        log_prob: (completions, tokens).
        mask: (completions, tokens) bool, valid tokens.
        rewards: (completions,).

    Returns:
        The sum over the valid tokens of these completions, and the number of these tokens, () each.
    """
    is_positive = mask & (rewards > 0)[:, None]
    return -log_prob.masked_fill(~is_positive, 0.0).sum(), is_positive.sum()


@torch.no_grad()
def sampling_mismatch(log_prob: Tensor, old: Tensor, sampler: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return measures of the mismatch between sampler and trainer, as sums over valid tokens, () each.

    Args:
        log_prob: (completions, tokens) under the trained policy.
        old: same shape, under the same policy at the time of the rollout.
        sampler: same shape, as reported by the sampler.
        mask: (completions, tokens) bool, valid tokens.

    Returns:
        mult_prob_error: exp |old - sampler|; the mean is 1 if sampler and trainer agree; above 1.02 they do not.
        sampler_kl, trainer_kl: k3 estimates of KL(sampler ‖ trainer) and KL(trainer ‖ sampler).
        js_divergence: divergence of sampler and trainer from their mean.
        entropy: entropy of the policy, estimated by importance sampling.
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
    """Return the ratio of each token, (completions, tokens); if `by_sequence`, the geometric mean of its completion."""
    if by_sequence:
        log_ratio = (log_ratio.sum(-1, keepdim=True) / _lengths(mask)[:, None]).expand_as(log_ratio)
    return log_ratio.exp()


def _clip_loss(log_prob: Tensor, ratio: Tensor, advantage: Tensor, s: PolicyGradient) -> Tensor:
    """Return the loss of each token before the correction for the sampler."""
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
    """Return the importance weight of each token, (completions, tokens), bounded as `importance_weights` says.

    It is the trainer's probability of the token (with sequence_level_importance_ratios: of the completion) divided by
    the sampler's, both at the time of the rollout; 1 without the correction.

    Args:
        log_ratio: (completions, tokens), 0 where `mask` is False.
        mask: valid tokens.
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
    """Return the weighted estimate of the KL divergence from the reference, (completions, tokens)."""
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


def _reduce(values: Tensor, mask: Tensor, by_token: bool) -> Tensor:
    """Return the sum over tokens if `by_token`, otherwise the sum over completions of the mean over their tokens."""
    values = values.masked_fill(~mask, 0.0)
    return values.sum() if by_token else (values.sum(-1) / _lengths(mask)).sum()


def _lengths(mask: Tensor) -> Tensor:
    """Return the number of valid tokens per completion, (completions,), at least 1."""
    return mask.sum(-1).clamp(min=1)
