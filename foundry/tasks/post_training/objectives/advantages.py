"""Advantages of completions relative to other completions of the same prompt."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantages of completions within their groups, in the dtype of the rewards, without gradients.

    Attributes:
        baseline: (completions,), subtracted from the reward.
        std: (completions,), standard deviation of the rewards that the baseline is a mean of; 0 if they are equal.
        advantage: (completions,), 0 if the reward is NaN or the only one of its group.
    """

    baseline: Tensor
    std: Tensor
    advantage: Tensor


@torch.no_grad()
def group_advantages(
    rewards: Tensor,
    groups: Tensor,
    *,
    use_rloo: bool = True,
    normalize_rewards: bool = True,
    epsilon: float = 1e-6,
) -> GroupAdvantages:
    """Return the advantage of each reward over the rewards of the same group (Shao et al., 2024).

    The leave-one-out baseline is from Ahmadian et al., 2024. The variance is computed from differences to one of the
    rewards, in two passes: E[x²] - E[x]² would leave a rounding error for equal rewards, and division by its square
    root would give advantages in the hundreds.

    Args:
        rewards: (completions,), floating point; NaN if a completion could not be scored, which excludes it.
        groups: (completions,) int64, equal for completions of the same prompt.
        use_rloo: compute baseline and standard deviation over the other completions of the group; False includes the
            completion itself.
        normalize_rewards: divide advantages by the standard deviation + `epsilon`, unless the deviation is 0.
        epsilon: added to the standard deviation.
    """
    values = rewards.double()
    baseline, std, advantage = values.clone(), torch.zeros_like(values), torch.zeros_like(values)
    for group in sorted(set(groups.tolist())):
        members = ((groups == group) & ~values.isnan()).nonzero().squeeze(-1)
        if len(members) < 2:
            continue
        group_values = values[members]
        peers = group_values.expand(len(group_values), -1)
        if use_rloo:
            peers = peers[~torch.eye(len(group_values), dtype=torch.bool, device=group_values.device)].view(
                len(group_values), -1
            )
        mean, deviation = mean_and_std(peers, torch.finfo(rewards.dtype).eps)
        difference = group_values - mean
        scaled = torch.where(deviation > 0, difference / (deviation + epsilon), difference)
        baseline[members], std[members] = mean, deviation
        advantage[members] = scaled if normalize_rewards else difference
    return GroupAdvantages(*(tensor.to(rewards.dtype) for tensor in (baseline, std, advantage)))


def penalized_rewards(rewards: Tensor, kl: Tensor, mask: Tensor, penalty: float) -> Tensor:
    """Return the rewards minus `penalty` x the sum of the KL divergence over each completion's tokens.

    Args:
        rewards: (completions,).
        kl: (completions, tokens), per-token estimates.
        mask: (completions, tokens) bool, valid tokens.
        penalty: weight of the KL divergence.
    """
    return rewards - penalty * kl.masked_fill(~mask, 0.0).sum(-1)


def mean_and_std(values: Tensor, rounding: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return mean and sample standard deviation of each row, (rows,); finite if the squares of the values are.

    Args:
        values: (rows, columns) float64.
        rounding: relative error of the values; a standard deviation up to 8 times this error is set to 0.
    """
    differences = values - values[:, :1]
    # Division by a power of two does not change any bit of the result, and keeps the sum of squares finite.
    scale = torch.frexp(differences.abs().amax(-1, keepdim=True)).exponent.to(values.dtype).exp2()
    scaled = differences / scale
    shift = scaled.mean(-1, keepdim=True)
    variance = (scaled - shift).square().sum(-1) / max(values.shape[-1] - 1, 1)
    std = variance.sqrt() * scale.squeeze(-1)
    mean = (values[:, :1] + shift * scale).squeeze(-1)
    return mean, std.where(std > 8 * rounding * values.abs().amax(-1), 0.0)
