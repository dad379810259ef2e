"""Cross-entropy of answers: supervised fine-tuning."""

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
    """Cross-entropy of the tokens that the model is to say, with an optional z-loss as in pre-training.

    A microbatch holds `tokens` and `targets`: (batch, seq) int64, targets -100 for prompts and padding, and `position`.
    Where rows hold several samples, also `documents`: (batch, seq) int64, the sample of each token, -1 for padding;
    `position` is then that of each sample. Of data with pictures also `images`: (batch, pictures, 3, size, size) uint8,
    which the model is given. Dropout is drawn by `seed` and the sample's position.
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
        """Number of targets that are not ignored; with `sft_average_log_probs` of samples that have any."""
        is_valid = valid_targets(microbatch) != IGNORED_TARGET
        if not self.settings.sft_average_log_probs:
            return int(is_valid.sum())
        if "documents" in microbatch:
            return len(set(microbatch["documents"][is_valid].tolist()))
        return int(is_valid.any(1).sum())

    def loss(self, model: nn.Module, microbatch: Microbatch) -> LossSum:
        """Sum over valid tokens, or over samples of the mean of theirs.

        The accuracy is the share of valid tokens of which the model finds no other more likely.
        """
        targets = valid_targets(microbatch)
        asked: dict[str, Any] = self._dropout_keys(microbatch, targets)
        asked |= document_keywords(model, microbatch)
        asked |= {name: microbatch[name] for name in ("images",) if name in microbatch}
        is_valid = targets != IGNORED_TARGET
        weights = is_valid.float()
        if self.settings.sft_average_log_probs:
            weights = weights / _tokens_of_sample(is_valid, microbatch.get("documents")).clamp(min=1)
        token_loss = TokenLoss(z_loss_coefficient=self.settings.z_loss_coefficient, weights=weights, finds_correct=True)
        output = ask_for_loss(model, microbatch["tokens"], targets, token_loss, **asked)
        assert output.loss is not None
        assert output.correct is not None
        metrics = {"accuracy": Mean(output.correct.sum().float(), is_valid.sum())}
        if self.settings.z_loss_coefficient:
            cross_entropy = -(output.log_prob * weights).sum()
            metrics |= {"cross_entropy": Mean(cross_entropy), "z_loss": Mean(output.loss.detach() - cross_entropy)}
        return LossSum(output.loss, metrics)

    def predict(self, model: nn.Module, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """Logits, (tokens, vocab), and targets, (tokens,) int64, where these are valid."""
        return predict_tokens(model, microbatch)

    def generate(self, model: nn.Module, data: Any, device: Any, **options: Any) -> TextSamples | PictureAnswers:
        """Answer prompts; options are those of `continue_text`, where the lengths and the temperature are open."""
        own = {"max_new_tokens": self.settings.sample_tokens, "temperature": self.settings.temperature}
        return continue_text(model, data, device, **{**own, **options})

    def _dropout_keys(self, microbatch: Microbatch, targets: Tensor) -> dict[str, Tensor]:
        """What the model keys its dropout by, (batch,) int64, where there is any."""
        if not self._has_dropout:
            return {}
        keys = keyed_integers(
            self.settings.seed, microbatch["position"], 2**62, stream="dropout", device=targets.device
        )
        return {"dropout_keys": keys}


def _tokens_of_sample(is_valid: Tensor, documents: Tensor | None) -> Tensor:
    """(batch, seq or 1) int64, how many valid tokens each token's sample has; is_valid: (batch, seq) bool."""
    if documents is None:
        return is_valid.sum(1, keepdim=True)
    samples = documents.flatten() + 1  # whole numbers, whose sum does not depend on the order of atomic additions
    counts = torch.zeros(samples.numel() + 1, dtype=torch.int64, device=samples.device)
    return counts.scatter_add_(0, samples, is_valid.flatten().long())[samples].view_as(documents)
