"""The loss of language models: a weighted sum over tokens, computed by the model itself if it supports this."""

import inspect
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from foundry.models.projected_loss import projected_loss
from foundry.models.token_log_probs import IGNORED_TARGET, TokenLogProbs, read_log_probs


@dataclass(frozen=True)
class TokenLoss:
    """Settings of the sum over tokens: weight x (cross-entropy + z_loss_coefficient x log-sum-exp²).

    Attributes:
        z_loss_coefficient: see PaLM (Chowdhery et al., 2022, section 5).
        weights: (batch, seq) float32, weight of each token; None means 1. Ignored targets always have weight 0.
        finds_correct: also return whether the argmax of the logits equals the target.
    """

    z_loss_coefficient: float = 0.0
    weights: Tensor | None = None
    finds_correct: bool = False

    def weigh(self, targets: Tensor) -> Tensor:
        """Return the weight of each token, (batch, seq) float32; 0 at ignored targets."""
        is_valid = targets != IGNORED_TARGET
        return is_valid.float() if self.weights is None else self.weights.float().masked_fill(~is_valid, 0.0)


def project_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_loss: TokenLoss,
    *,
    softcap: float | None = None,
    tile_tokens: int = 0,
) -> TokenLogProbs:
    """Project hidden states onto the vocabulary and sum the loss of the tokens, with `projected_loss`.

    Args:
        hidden: (batch, seq, hidden_size).
        weight: (vocab, hidden_size), weight matrix of the head.
        targets: (batch, seq) int64, -100 where ignored.
        token_loss: loss settings.
        softcap: bound of the logits, as for `soft_capped`; None for none.
        tile_tokens: positions projected at a time; 0 chooses a fast value.
    """
    loss, log_prob, logsumexp, correct = projected_loss(
        hidden.flatten(0, 1),
        weight,
        targets.flatten(),
        token_loss.weigh(targets).flatten(),
        z_loss_coefficient=token_loss.z_loss_coefficient,
        finds_correct=token_loss.finds_correct,
        softcap=softcap,
        tile_tokens=tile_tokens,
    )
    log_prob, logsumexp = (tensor.view(targets.shape) for tensor in (log_prob, logsumexp))
    ignored = targets == IGNORED_TARGET
    is_correct = correct.view(targets.shape) & ~ignored if token_loss.finds_correct else None
    return TokenLogProbs(log_prob.masked_fill(ignored, 0.0), logsumexp, loss=loss, correct=is_correct)


def read_loss(logits: Tensor, targets: Tensor, token_loss: TokenLoss, *, tile_tokens: int = 0) -> TokenLogProbs:
    """Sum the loss of tokens from their logits.

    Args:
        logits: (batch, seq, vocab).
        targets: (batch, seq) int64, -100 where ignored.
        token_loss: loss settings.
        tile_tokens: as in `read_log_probs`.
    """
    read = _find_correct if token_loss.finds_correct else None
    return _with_loss(read_log_probs(logits, targets, tile_tokens=tile_tokens, read=read), targets, token_loss)


def ask_for_loss(
    model: nn.Module, tokens: Tensor, targets: Tensor, token_loss: TokenLoss, **options: Any
) -> TokenLogProbs:
    """Run a language model and return its outputs with the loss.

    The model computes the loss itself if its forward() takes `token_loss`; otherwise the loss is computed here, from
    the log-probabilities that the model returns.

    Args:
        model: maps (tokens, targets) to `TokenLogProbs`; wrapped or not.
        tokens: (batch, seq) int64.
        targets: (batch, seq) int64, -100 where ignored.
        token_loss: loss settings.
        options: further keyword arguments of the model.
    """
    kind: Any = type(model.module if isinstance(model, DistributedDataParallel) else model)
    if _computes_loss(kind):
        output: TokenLogProbs = model(tokens, targets, token_loss=token_loss, **options)
        return output
    read = {"read": _find_correct} if token_loss.finds_correct else {}
    return _with_loss(model(tokens, targets, **read, **options), targets, token_loss)


@cache
def _computes_loss(kind: type[nn.Module]) -> bool:
    return "token_loss" in inspect.signature(kind.forward).parameters


def _with_loss(output: TokenLogProbs, targets: Tensor, token_loss: TokenLoss) -> TokenLogProbs:
    losses = -output.log_prob
    if token_loss.z_loss_coefficient:
        losses = losses + token_loss.z_loss_coefficient * output.logsumexp.square()
    return replace(
        output,
        loss=(token_loss.weigh(targets) * losses).sum(),
        log_prob=output.log_prob.detach(),
        logsumexp=output.logsumexp.detach(),
        correct=output.read.get("correct"),
    )


def _find_correct(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return whether the argmax of the logits equals the target, (tokens,) bool; False at ignored targets."""
    return {"correct": logits.argmax(-1) == targets}
