"""Cross-entropy of responses, for supervised fine-tuning."""

from typing import Any

import torch
from torch import Tensor, nn

from foundry.config.configured import configured_by, from_settings
from foundry.config.schemas.objective import SFT as SFTSettings
from foundry.core.keyed_random import keyed_integers
from foundry.core.protocols import LossSum, Mean, Microbatch, Objective
from foundry.generation.picture_answers import PictureAnswers
from foundry.generation.text_samples import TextSamples, continue_text
from foundry.models.token_log_probs import IGNORED_TARGET
from foundry.models.token_loss import TokenLoss, ask_for_loss
from foundry.objectives.next_token import predict_tokens, valid_targets
from foundry.objectives.unpacking import document_keywords


class SFT(Objective):
    """Cross-entropy on the assistant tokens, with an optional z-loss as in pretraining.

    A microbatch holds `tokens` and `targets`: (batch, seq) int64, targets -100 for prompts and padding, and `position`.
    Packed rows also have `documents`: (batch, seq) int64, index of each token's sample, -1 for padding; `position` then
    has one entry per sample. Data with images also has `images`: (batch, images, 3, size, size) uint8, which are passed
    to the model. With dropout, the model also gets dropout keys, which depend on `seed` and the sample's position.
    """

    reads_log_probs = True
    asks_for_loss = True
    metrics: tuple[str, ...] = from_settings()
    forward_keywords: tuple[str, ...] = ("read",)

    @configured_by(SFTSettings)
    def __init__(self, settings: SFTSettings) -> None:
        self.settings = settings
        self._has_dropout = bool(settings.hidden_dropout or settings.attention_dropout)
        if self._has_dropout:
            self.forward_keywords += ("dropout_keys",)

    def num_valid(self, microbatch: Microbatch) -> int:
        """Return the number of targets that are not ignored.

        With `sft_average_log_probs`, return the number of samples with at least one of these targets.
        """
        is_valid = valid_targets(microbatch) != IGNORED_TARGET
        if not self.settings.sft_average_log_probs:
            return int(is_valid.sum())
        if "documents" in microbatch:
            return len(set(microbatch["documents"][is_valid].tolist()))
        return int(is_valid.any(1).sum())

    def loss(self, model: nn.Module, microbatch: Microbatch) -> LossSum:
        """Return the sum of the loss over valid tokens.

        With `sft_average_log_probs`, return the sum over samples of the mean loss of a sample's valid tokens. The
        metric `accuracy` is the fraction of valid tokens whose target is the argmax.
        """
        targets = valid_targets(microbatch)
        keywords: dict[str, Any] = self._dropout_keys(microbatch, targets)
        keywords |= document_keywords(model, microbatch)
        keywords |= {name: microbatch[name] for name in ("images",) if name in microbatch}
        is_valid = targets != IGNORED_TARGET
        weights = is_valid.float()
        if self.settings.sft_average_log_probs:
            weights = weights / _tokens_of_sample(is_valid, microbatch.get("documents")).clamp(min=1)
        token_loss = TokenLoss(z_loss_coefficient=self.settings.z_loss_coefficient, weights=weights, finds_correct=True)
        output = ask_for_loss(model, microbatch["tokens"], targets, token_loss, **keywords)
        assert output.loss is not None
        assert output.correct is not None
        metrics = {"accuracy": Mean(output.correct.sum().float(), is_valid.sum())}
        if self.settings.z_loss_coefficient:
            cross_entropy = -(output.log_prob * weights).sum()
            metrics |= {"cross_entropy": Mean(cross_entropy), "z_loss": Mean(output.loss.detach() - cross_entropy)}
        return LossSum(output.loss, metrics)

    def predict(self, model: nn.Module, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """Return logits, (tokens, vocab), and targets, (tokens,) int64, at valid targets."""
        return predict_tokens(model, microbatch)

    def generate(self, model: nn.Module, data: Any, device: Any, **options: Any) -> TextSamples | PictureAnswers:
        """Answer prompts.

        Options are passed to `continue_text`; defaults of `max_new_tokens` and `temperature` are from the settings.
        """
        defaults = {"max_new_tokens": self.settings.sample_tokens, "temperature": self.settings.temperature}
        return continue_text(model, data, device, **{**defaults, **options})

    def _dropout_keys(self, microbatch: Microbatch, targets: Tensor) -> dict[str, Tensor]:
        """Return the keyword argument with the dropout key of each sample, (samples,) int64; empty without dropout."""
        if not self._has_dropout:
            return {}
        keys = keyed_integers(
            self.settings.seed, microbatch["position"], 2**62, stream="dropout", device=targets.device
        )
        return {"dropout_keys": keys}


def _tokens_of_sample(is_valid: Tensor, documents: Tensor | None) -> Tensor:
    """Return the number of valid tokens in each token's sample, (batch, seq or 1) int64.

    Args:
        is_valid: (batch, seq) bool.
        documents: (batch, seq) int64, sample of each token in packed rows; None if each row is a sample.
    """
    if documents is None:
        return is_valid.sum(1, keepdim=True)
    samples = documents.flatten() + 1  # integers, so the sum does not depend on the order of atomic additions
    counts = torch.zeros(samples.numel() + 1, dtype=torch.int64, device=samples.device)
    return counts.scatter_add_(0, samples, is_valid.flatten().long())[samples].view_as(documents)
