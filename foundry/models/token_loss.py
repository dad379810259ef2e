"""The loss of a language model as one function of its hidden states, whose gradients are made where logits exist."""

import inspect
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

from foundry.models.token_log_probs import IGNORED_TARGET, TokenLogProbs

_CPU_TILE_TOKENS = 256
_TILE_ELEMENTS = 2**28
"""Logits that exist at a time where the device is no CPU, on which a few hundred tokens are the fastest."""


@dataclass(frozen=True)
class TokenLoss:
    """What is summed over tokens: weight x (cross-entropy + z_loss_coefficient x log-sum-exp²).

    Attributes:
        z_loss_coefficient: see PaLM (Chowdhery et al., 2022, section 5).
        weights: (batch, seq) float32, of each token; None: 1. An ignored target has none.
        finds_correct: also say whether the likeliest token is the target.
    """

    z_loss_coefficient: float = 0.0
    weights: Tensor | None = None
    finds_correct: bool = False


def project_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, wanted: TokenLoss, tile_tokens: int = 0
) -> TokenLogProbs:
    """Sum the loss of tokens over a projection of hidden states onto the vocabulary.

    The gradients of hidden states and head are made tile by tile in the forward pass, so that a tile of logits exists
    once and is projected once; that of the head is summed in float32 at least.

    Args:
        hidden: (batch, seq, hidden_size).
        weight: (vocab, hidden_size), the head's matrix.
        targets: (batch, seq) int64, -100 where ignored.
        wanted: the loss.
        tile_tokens: positions projected at a time; 0: as many as are fast.

    Returns:
        `loss`, which is differentiable, and `log_prob`, `logsumexp` and `correct`, which are not.
    """
    weights = _weights(wanted, targets)
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    tile = tile_tokens or (_CPU_TILE_TOKENS if device == "cpu" else max(1, _TILE_ELEMENTS // weight.shape[0]))
    loss, log_prob, logsumexp, correct = _ProjectedLoss.apply(
        hidden.flatten(0, 1),
        weight,
        targets.flatten(),
        weights.flatten(),
        wanted.z_loss_coefficient,
        wanted.finds_correct,
        tile,
        dtype,
        torch.is_grad_enabled(),
    )
    shaped = (tensor.view(targets.shape) for tensor in (log_prob, logsumexp))
    return TokenLogProbs(*shaped, loss=loss, correct=correct.view(targets.shape) if wanted.finds_correct else None)


class _ProjectedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        weights: Tensor,
        z_loss_coefficient: float,
        finds_correct: bool,
        tile_tokens: int,
        dtype: torch.dtype,
        has_backward: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        needs_hidden, needs_weight = (has_backward and needed for needed in ctx.needs_input_grad[:2])
        exact = torch.promote_types(dtype, torch.float32)
        head = weight.to(dtype)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if needs_weight else None
        log_prob, logsumexp = (hidden.new_empty(len(targets), dtype=exact) for _ in range(2))
        correct = targets.new_empty(len(targets) if finds_correct else 0, dtype=torch.bool)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(targets), tile_tokens):
                own = slice(start, start + tile_tokens)
                states, target = hidden[own].to(dtype), targets[own].clamp(min=0)[:, None]
                logits = (states @ head.T).to(exact)
                of_tile = logits.log_softmax(-1)
                log_prob[own] = of_tile.gather(-1, target)[:, 0]
                logsumexp[own] = logits.gather(-1, target)[:, 0] - log_prob[own]
                if finds_correct:
                    correct[own] = of_tile.amax(-1) == log_prob[own]
                if not (needs_hidden or needs_weight):
                    continue
                factors = weights[own] * (1 + 2 * z_loss_coefficient * logsumexp[own])
                grad = of_tile.exp_().mul_(factors[:, None])
                grad.scatter_add_(-1, target, -weights[own, None].to(exact))
                grad = grad.to(dtype)
                if grad_hidden is not None:
                    grad_hidden[own] = grad @ head
                if grad_weight is not None and dtype is exact:
                    torch.addmm(grad_weight, grad.T, states, out=grad_weight)
                elif grad_weight is not None:
                    grad_weight += grad.T @ states
        is_ignored = targets == IGNORED_TARGET
        log_prob.masked_fill_(is_ignored, 0.0)
        if finds_correct:
            correct &= ~is_ignored
        losses = weights * (z_loss_coefficient * logsumexp.square() - log_prob)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(log_prob, logsumexp, correct)
        return losses.sum(), log_prob, logsumexp, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        grad_hidden = None if grad_hidden is None else grad_hidden * scale.to(grad_hidden.dtype)
        grad_weight = None if grad_weight is None else grad_weight.mul_(scale).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, *[None] * 7


def ask_for_loss(model: nn.Module, tokens: Tensor, targets: Tensor, wanted: TokenLoss, **asked: Any) -> TokenLogProbs:
    """What a model answers to tokens and targets, with the loss: made by it, or of the log-probabilities that it gives.

    Args:
        model: maps (tokens, targets) to `TokenLogProbs`, wrapped or not; it makes the loss if its forward() takes
            `token_loss`.
        tokens: (batch, seq) int64.
        targets: (batch, seq) int64, -100 where ignored.
        wanted: the loss.
        asked: further keywords of the model.
    """
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    if _takes_token_loss(type(inner)):
        answered: TokenLogProbs = model(tokens, targets, token_loss=wanted, **asked)
        return answered
    read = {"read": _find_correct} if wanted.finds_correct else {}
    output: TokenLogProbs = model(tokens, targets, **read, **asked)
    weights = _weights(wanted, targets)
    losses = wanted.z_loss_coefficient * output.logsumexp.square() - output.log_prob
    return replace(
        output,
        loss=(weights * losses).sum(),
        log_prob=output.log_prob.detach(),
        logsumexp=output.logsumexp.detach(),
        correct=output.read.get("correct"),
    )


@cache
def _takes_token_loss(kind: type[nn.Module]) -> bool:
    return "token_loss" in inspect.signature(kind.forward).parameters


def _weights(wanted: TokenLoss, targets: Tensor) -> Tensor:
    """(batch, seq) float32, 0 where the target is ignored."""
    is_valid = targets != IGNORED_TARGET
    return is_valid.float() if wanted.weights is None else wanted.weights.float().masked_fill(~is_valid, 0.0)


def _find_correct(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Whether the likeliest token is the target, (tokens,) bool; never where that is ignored."""
    return {"correct": logits.argmax(-1) == targets}
