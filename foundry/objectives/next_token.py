"""Next-token cross-entropy, for pretraining."""

from typing import Any

from torch import Tensor, nn

from foundry.config.configured import configured_by, from_settings
from foundry.config.schemas.objective import NextToken as NextTokenSettings
from foundry.core.protocols import LossSum, Mean, Microbatch, Objective
from foundry.generation.picture_answers import PictureAnswers
from foundry.generation.text_samples import TextSamples, continue_text
from foundry.models.token_log_probs import IGNORED_TARGET
from foundry.models.token_loss import TokenLoss, ask_for_loss
from foundry.objectives.unpacking import document_keywords


class NextToken(Objective):
    """Cross-entropy of the next token, with an optional z-loss (PaLM, Chowdhery et al., 2022, section 5).

    A microbatch holds `tokens` and `targets`: (batch, seq) int64, targets -100 where ignored, and `position`. The model
    maps (tokens, targets) to `TokenLogProbs`.
    """

    reads_log_probs = True
    asks_for_loss = True
    """With models that use `project_loss`, logits are computed tile by tile even if `logprob_tile_tokens` is 0."""
    metrics: tuple[str, ...] = from_settings()

    @configured_by(NextTokenSettings)
    def __init__(self, settings: NextTokenSettings) -> None:
        self.settings = settings

    def num_valid(self, microbatch: Microbatch) -> int:
        """Return the number of targets that are not ignored, in samples that are not padding."""
        return int((valid_targets(microbatch) != IGNORED_TARGET).sum())

    def loss(self, model: nn.Module, microbatch: Microbatch) -> LossSum:
        """Return the sum over valid tokens of cross-entropy + z_loss_coefficient x logsumexp².

        With a z-loss, its weighted sum and the sum of the cross-entropy are also returned as metrics.
        """
        targets = valid_targets(microbatch)
        token_loss = TokenLoss(z_loss_coefficient=self.settings.z_loss_coefficient)
        output = ask_for_loss(model, microbatch["tokens"], targets, token_loss)
        assert output.loss is not None
        if self.settings.z_loss_coefficient == 0:
            return LossSum(output.loss)
        cross_entropy = -output.log_prob.sum()
        return LossSum(
            output.loss, {"cross_entropy": Mean(cross_entropy), "z_loss": Mean(output.loss.detach() - cross_entropy)}
        )

    def predict(self, model: nn.Module, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """Return logits, (tokens, vocab), and targets, (tokens,) int64, at valid targets."""
        return predict_tokens(model, microbatch)

    def generate(self, model: nn.Module, data: Any, device: Any, **options: Any) -> TextSamples | PictureAnswers:
        """Continue prompts.

        Options are passed to `continue_text`; defaults of `max_new_tokens` and `temperature` are from the settings.
        """
        defaults = {"max_new_tokens": self.settings.sample_tokens, "temperature": self.settings.temperature}
        return continue_text(model, data, device, **{**defaults, **options})


def predict_tokens(model: nn.Module, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
    """Return a language model's logits, (tokens, vocab), and targets, (tokens,) int64, at targets not ignored."""
    targets = valid_targets(microbatch)
    keywords = document_keywords(model, microbatch)
    keywords |= {name: microbatch[name] for name in ("images",) if name in microbatch}
    logits: Tensor = model(microbatch["tokens"], return_logits=True, **keywords).logits
    is_valid = targets != IGNORED_TARGET
    return logits[is_valid], targets[is_valid]


def valid_targets(microbatch: Microbatch) -> Tensor:
    """Return the targets, (batch, seq) int64, with the targets of padding samples set to -100."""
    targets, is_padding = microbatch["targets"], microbatch["position"] < 0
    if not bool(is_padding.any()):  # `position` is in host memory, so this does not synchronize with the device
        return targets
    return targets.masked_fill(is_padding.to(targets.device, non_blocking=True)[:, None], IGNORED_TARGET)
