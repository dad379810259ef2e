"""Direct preference optimization: increases the likelihood of chosen responses relative to rejected ones."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundry.config.configured import configured_by, from_settings
from foundry.core.protocols import LossSum, Mean, Microbatch, Objective
from foundry.models.lora import adapters_off
from foundry.models.token_log_probs import IGNORED_TARGET
from foundry.objectives.unpacking import document_keywords, unpack
from foundry.tasks.post_training.schemas.objective import DPO as DPOSettings
from foundry.tasks.post_training.schemas.objective import PreferenceLoss, Reference

_REFERENCE = "reference"


class DPO(Objective):
    """Preference loss over pairs of responses, relative to a reference: the model at the start of the run.

    A microbatch holds `tokens` and `targets`: (pairs, 2, seq) int64, the chosen response first, targets -100 for
    prompts and padding, and `position`: (pairs,); with a cached reference also `reference`: (pairs, 2). If pairs are
    packed into rows, tokens, targets and `documents` are (packs, 2, seq) int64, and `documents` is 2n for tokens of the
    n-th pair's chosen response, 2n + 1 for its rejected response, and -1 for padding. A pair is valid if it is not
    padding and both responses have targets. The loss is a mean over valid pairs, initially ln 2 with the sigmoid loss;
    see `pair_losses` for the settings.
    """

    reads_log_probs = True
    metrics: tuple[str, ...] = from_settings()

    @configured_by(DPOSettings)
    def __init__(self, settings: DPOSettings, *, has_adapters: bool = False) -> None:
        self.settings, reference = settings, settings.reference
        if reference is Reference.auto:
            reference = Reference.adapters_off if has_adapters else Reference.cached
        self._is_within = reference is Reference.adapters_off
        self.frozen_models: Mapping[str, Any] = {} if self._is_within else {_REFERENCE: None}
        self.columns = (_REFERENCE,) if reference is Reference.cached else ()

    def compare(self, frozen: Mapping[str, nn.Module]) -> None:
        """Set the reference model; None if its log-probabilities are cached, or computed with disabled adapters."""
        self._reference = frozen.get(_REFERENCE)

    def precompute(self, microbatch: Microbatch) -> dict[str, Tensor]:
        """Return `reference`: (pairs, 2) float64, log-probabilities of the responses under the reference model."""
        assert self._reference is not None
        return {_REFERENCE: _response_log_probs(self._reference, microbatch)}

    def num_valid(self, microbatch: Microbatch) -> int:
        """Return the number of valid pairs."""
        return int(_is_valid(microbatch).sum())

    def loss(self, model: nn.Module, microbatch: Microbatch) -> LossSum:
        """Return the sum of the pairs' losses; rewards in the metrics are β times the log-ratios to the reference."""
        reference = self._compute_reference(model, microbatch)
        log_prob = _response_log_probs(model, microbatch)
        is_valid, num_tokens = _is_valid(microbatch), _num_tokens(microbatch)
        losses = pair_losses(log_prob, reference, num_tokens, is_valid, self.settings)
        rewards = self.settings.ref_policy_kl_penalty * losses.rewards.detach()
        margin = rewards[:, 0] - rewards[:, 1]
        # Per token, so that long and short responses are comparable.
        chosen = (log_prob.detach()[:, 0] / num_tokens[:, 0].clamp(min=1)).masked_fill(~is_valid, 0.0)
        values = {
            "preference_loss": losses.preference.detach(),
            "sft_loss": losses.sft.detach(),
            "accuracy": ((margin > 0) & is_valid).float(),
            "margin": margin,
            "chosen_reward": rewards[:, 0],
            "rejected_reward": rewards[:, 1],
            "chosen_log_prob": chosen,
        }
        return LossSum(losses.loss.sum().float(), {name: Mean(v.sum().float()) for name, v in values.items()})

    @torch.no_grad()
    def _compute_reference(self, model: nn.Module, microbatch: Microbatch) -> Tensor:
        """Return the reference's log-probabilities, (pairs, 2) float64.

        Called before the policy's forward pass, because FSDP2 requires the backward pass to follow directly after it.
        """
        if _REFERENCE in microbatch:
            return microbatch[_REFERENCE]
        if not self._is_within:
            return self.precompute(microbatch)[_REFERENCE]
        with adapters_off(model), _without_dropout(model):
            return _response_log_probs(model, microbatch)


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside the context."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _is_valid(microbatch: Microbatch) -> Tensor:
    """Return the mask of valid pairs, (pairs,) bool, on the device of the microbatch.

    A pair is valid if it is not padding and both of its responses have targets.
    """
    has_tokens = _num_tokens(microbatch).gt(0).all(-1)
    return has_tokens & (microbatch["position"] >= 0).to(has_tokens.device, non_blocking=True)


def _num_tokens(microbatch: Microbatch) -> Tensor:
    """Return the number of targets in each response, (pairs, 2) int64."""
    is_token = microbatch["targets"].flatten(0, -2) != IGNORED_TARGET
    return unpack(is_token, microbatch, parts=2).sum(-1).view(-1, 2)


def _response_log_probs(model: nn.Module, microbatch: Microbatch) -> Tensor:
    """Return the log-probabilities of responses, (pairs, 2) float64.

    Sums over tokens are in float64: in float32, long sums would lose a small margin.
    """
    tokens, targets = (microbatch[name].flatten(0, -2) for name in ("tokens", "targets"))
    log_prob: Tensor = model(tokens, targets, **document_keywords(model, microbatch)).log_prob
    return unpack(log_prob, microbatch, parts=2).double().sum(-1).view(-1, 2)


@dataclass(frozen=True)
class PairLosses:
    """Losses of pairs of responses, in the dtype of the inputs; exactly 0 for invalid pairs.

    Attributes:
        loss: (pairs,), the weighted sum of `preference` and `sft`.
        preference: (pairs,).
        sft: (pairs,), negative log-probability of the chosen response.
        rewards: (pairs, 2), log-ratios of the chosen and the rejected response to the reference, not multiplied by β.
    """

    loss: Tensor
    preference: Tensor
    sft: Tensor
    rewards: Tensor


@configured_by(DPOSettings)
def pair_losses(
    log_prob: Tensor, reference: Tensor, num_tokens: Tensor, is_valid: Tensor, settings: DPOSettings
) -> PairLosses:
    """Compute the loss of each pair from the log-probabilities of its two responses, chosen first.

    With the margin δ, the log-ratio of the chosen response to the reference minus that of the rejected response, and
    β = ref_policy_kl_penalty, the sigmoid loss is -log σ(βδ) (Rafailov et al., 2023, equation 7), hinge is max(0, 1 -
    βδ) (Zhao et al., 2023) and ipo is (δ - 1 / 2β)² (Azar et al., 2023, equation 17). For ipo, log-ratios are best
    averaged over tokens. Label smoothing ε turns the loss into (1 - ε) loss(δ) + ε loss(-δ).

    Args:
        log_prob: (pairs, 2), log-probabilities under the model, summed over the tokens of each response.
        reference: (pairs, 2), log-probabilities under the reference.
        num_tokens: (pairs, 2), tokens of each response.
        is_valid: (pairs,) bool, valid pairs.
        settings: settings of the losses.
    """
    s = settings
    log_prob, reference = (tensor.masked_fill(~is_valid[:, None], 0.0) for tensor in (log_prob, reference))
    num_tokens = num_tokens.clamp(min=1)
    rewards = log_prob - reference
    if s.preference_average_log_probs:
        rewards = rewards / num_tokens
    curve, margin = _CURVES[s.loss_type], rewards[:, 0] - rewards[:, 1]
    preference = curve(margin, s.ref_policy_kl_penalty)
    if s.label_smoothing > 0:
        flipped = curve(-margin, s.ref_policy_kl_penalty)
        preference = (1 - s.label_smoothing) * preference + s.label_smoothing * flipped
    preference = preference.masked_fill(~is_valid, 0.0)
    sft = -log_prob[:, 0]
    if s.sft_average_log_probs:
        sft = sft / num_tokens[:, 0]
    return PairLosses(s.preference_loss_weight * preference + s.sft_loss_weight * sft, preference, sft, rewards)


_CURVES: dict[PreferenceLoss, Callable[[Tensor, float], Tensor]] = {
    PreferenceLoss.sigmoid: lambda margin, beta: -F.logsigmoid(beta * margin),
    PreferenceLoss.hinge: lambda margin, beta: F.relu(1 - beta * margin),
    PreferenceLoss.ipo: lambda margin, beta: (margin - 1 / (2 * beta)).square(),
}
