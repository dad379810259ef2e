"""Direct preference optimisation: chosen responses become likelier than rejected ones."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from foundry.config.schemas.objective import PreferenceLoss


@dataclass(frozen=True)
class PairLosses:
    """What pairs of responses cost; of the inputs' dtype, exactly 0 for pairs that do not count.

    Attributes:
        loss: (pairs,), the weighted sum of the other two.
        preference: (pairs,).
        sft: (pairs,), the negative log-probability of the chosen response.
        rewards: (pairs, 2), log-ratios to the reference of chosen and rejected, not multiplied by β.
    """

    loss: Tensor
    preference: Tensor
    sft: Tensor
    rewards: Tensor


def pair_losses(
    log_prob: Tensor,
    reference: Tensor,
    num_tokens: Tensor,
    is_valid: Tensor,
    *,
    ref_policy_kl_penalty: float = 0.05,
    loss_type: PreferenceLoss = PreferenceLoss.sigmoid,
    label_smoothing: float = 0.0,
    preference_loss_weight: float = 1.0,
    sft_loss_weight: float = 0.0,
    preference_average_log_probs: bool = False,
    sft_average_log_probs: bool = False,
) -> PairLosses:
    """Loss of each pair from the log-probabilities of its two responses, chosen first.

    With δ the chosen less the rejected response's log-ratio to the reference and β the penalty: sigmoid is
    -log σ(βδ) (Rafailov et al., 2023, equation 7), hinge max(0, 1 - βδ) (Zhao et al., 2023) and ipo
    (δ - 1 / 2β)² (Azar et al., 2023, equation 17), for which log-ratios are best averaged over tokens. Label
    smoothing ε makes it (1 - ε) loss(δ) + ε loss(-δ).

    Args:
        log_prob: (pairs, 2), summed over the tokens of each response, under the model.
        reference: (pairs, 2), under the reference.
        num_tokens: (pairs, 2), of each response.
        is_valid: (pairs,) bool, pairs that count.
        ref_policy_kl_penalty: β, above 0.
        loss_type: what is made of the margin.
        label_smoothing: share ε of pairs whose order is taken to be wrong, below ½.
        preference_loss_weight: of the loss above.
        sft_loss_weight: of the negative log-probability of the chosen response.
        preference_average_log_probs: log-ratios are divided by the length of their response.
        sft_average_log_probs: likewise the negative log-probability.
    """
    log_prob, reference = (tensor.masked_fill(~is_valid[:, None], 0.0) for tensor in (log_prob, reference))
    num_tokens = num_tokens.clamp(min=1)
    rewards = log_prob - reference
    if preference_average_log_probs:
        rewards = rewards / num_tokens
    curve, margin = _CURVES[loss_type], rewards[:, 0] - rewards[:, 1]
    preference = curve(margin, ref_policy_kl_penalty)
    if label_smoothing > 0:
        flipped = curve(-margin, ref_policy_kl_penalty)
        preference = (1 - label_smoothing) * preference + label_smoothing * flipped
    preference = preference.masked_fill(~is_valid, 0.0)
    sft = -log_prob[:, 0]
    if sft_average_log_probs:
        sft = sft / num_tokens[:, 0]
    return PairLosses(preference_loss_weight * preference + sft_loss_weight * sft, preference, sft, rewards)


_CURVES: dict[PreferenceLoss, Callable[[Tensor, float], Tensor]] = {
    PreferenceLoss.sigmoid: lambda margin, beta: -F.logsigmoid(beta * margin),
    PreferenceLoss.hinge: lambda margin, beta: F.relu(1 - beta * margin),
    PreferenceLoss.ipo: lambda margin, beta: (margin - 1 / (2 * beta)).square(),
}
