"""Per-token estimators of the KL divergence between a policy and its reference."""

import torch
from torch import Tensor

from foundry.tasks.post_training.schemas.policy import KLType


def kl_estimate(
    log_prob: Tensor,
    reference: Tensor,
    *,
    kl_type: KLType = KLType.k3,
    input_clamp: float | None = 20.0,
    output_clamp: float | None = 10.0,
    weights: Tensor | None = None,
) -> Tensor:
    """Estimate KL(policy ‖ reference) at tokens sampled from the policy.

    Estimators from Schulman, "Approximating KL divergence", 2020. With r = reference - log_prob: k1 is -r, k2 is r²/2
    and k3 is e^r - 1 - r. A token whose r or estimate is clamped has no gradient, not even through its weight.

    Args:
        log_prob: log-probabilities of the sampled tokens under the policy, any shape.
        reference: log-probabilities under the reference, same shape.
        kl_type: estimator; k1 and k3 are unbiased, k2 and k3 are never negative.
        input_clamp: largest |r|; None disables clamping.
        output_clamp: largest magnitude of the weighted estimate; None disables clamping.
        weights: weight of each token, such as the probability ratio of the policy to the sampling policy.
    """
    r = reference - log_prob
    if input_clamp is not None:
        if weights is not None:
            weights = torch.where(r.abs() <= input_clamp, weights, weights.detach())
        r = r.clamp(-input_clamp, input_clamp)
    match kl_type:
        case KLType.k1:
            kl = -r
        case KLType.k2:
            kl = r.square() / 2
        case KLType.k3:
            kl = torch.expm1(r) - r
    if weights is not None:
        kl = weights * kl
    return kl if output_clamp is None else kl.clamp(-output_clamp, output_clamp)
