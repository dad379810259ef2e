"""Advantages of completions over the others of their prompt."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupAdvantages:
    """What completions are worth within their groups; of the rewards' dtype, without gradients.

    Attributes:
        baseline: (completions,), what each reward is compared with.
        std: (completions,), the deviation by which it may be divided; 0 where a group has none.
        advantage: (completions,), 0 where a reward is NaN or has none to be compared with.
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
    """Compare each reward with those of the same group (Shao et al., 2024; leave-one-out: Ahmadian et al., 2024).

    The variance is taken of differences to one of the rewards, in two passes: E[x²] - E[x]² leaves a rounding error
    where the rewards are equal, and a division by its root makes an advantage of hundreds.

    Args:
        rewards: (completions,), floating point; NaN where a completion cannot be scored, and does not count.
        groups: (completions,) int64, the same number for completions of one prompt.
        use_rloo: baseline and deviation are those of the other completions; False: of all.
        normalize_rewards: divide by the deviation + `epsilon`, where there is one.
        epsilon: added to the deviation.
    """
    values = rewards.double()
    baseline, std, advantage = values.clone(), torch.zeros_like(values), torch.zeros_like(values)
    for group in sorted(set(groups.tolist())):
        members = ((groups == group) & ~values.isnan()).nonzero().squeeze(-1)
        if len(members) < 2:
            continue
        own = values[members]
        peers = own.expand(len(own), -1)
        if use_rloo:
            peers = peers[~torch.eye(len(own), dtype=torch.bool, device=own.device)].view(len(own), -1)
        mean, deviation = mean_and_std(peers, torch.finfo(rewards.dtype).eps)
        difference = own - mean
        scaled = torch.where(deviation > 0, difference / (deviation + epsilon), difference)
        baseline[members], std[members] = mean, deviation
        advantage[members] = scaled if normalize_rewards else difference
    return GroupAdvantages(*(tensor.to(rewards.dtype) for tensor in (baseline, std, advantage)))


def penalized_rewards(rewards: Tensor, kl: Tensor, mask: Tensor, penalty: float) -> Tensor:
    """Rewards less `penalty` x the sum of the divergence over each completion's tokens.

    Args:
        rewards: (completions,).
        kl: (completions, tokens), an estimate token by token.
        mask: (completions, tokens) bool, tokens that count.
        penalty: weight of the divergence.
    """
    return rewards - penalty * kl.masked_fill(~mask, 0.0).sum(-1)


def mean_and_std(values: Tensor, rounding: float = 0.0) -> tuple[Tensor, Tensor]:
    """Mean and sample standard deviation of each row, (rows,); finite if the squares of the values are.

    Args:
        values: (rows, columns) float64.
        rounding: relative error of the values; a deviation that it can explain is 0.
    """
    differences = values - values[:, :1]
    # A power of two, which changes no bit of the result and keeps the sum of squares finite.
    scale = torch.frexp(differences.abs().amax(-1, keepdim=True)).exponent.to(values.dtype).exp2()
    scaled = differences / scale
    shift = scaled.mean(-1, keepdim=True)
    variance = (scaled - shift).square().sum(-1) / max(values.shape[-1] - 1, 1)
    std = variance.sqrt() * scale.squeeze(-1)
    mean = (values[:, :1] + shift * scale).squeeze(-1)
    return mean, std.where(std > 8 * rounding * values.abs().amax(-1), 0.0)
