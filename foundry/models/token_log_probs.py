"""The one thing objectives ask of a language model: the log-probability of given tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IGNORED_TARGET = -100
"""A target that counts for nothing: PyTorch's and transformers' convention."""

_CPU_CHUNK_ELEMENTS = 2**21


@dataclass(frozen=True)
class TokenLogProbs:
    """What a causal model says about target tokens; differentiable through every field.

    Attributes:
        log_prob: (batch, seq) float32, log p(target); exactly 0 at ignored targets. (batch, 0) without targets.
        logsumexp: (batch, seq) float32, log-sum-exp of the logits, at ignored targets too. (batch, 0) without targets.
        logits: (batch, seq, vocab) in the compute dtype, where asked for.
    """

    log_prob: Tensor
    logsumexp: Tensor
    logits: Tensor | None = None


def project_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor | None,
    *,
    tile_tokens: int = 0,
    return_logits: bool = False,
) -> TokenLogProbs:
    """Project hidden states onto the vocabulary and read off the log-probabilities of the targets in fp32.

    Args:
        hidden: (batch, seq, hidden_size).
        weight: (vocab, hidden_size), the head's matrix.
        targets: (batch, seq) int64, -100 where ignored; None: only logits are computed.
        tile_tokens: positions projected at a time and recomputed in the backward pass, so that no more than
            tile_tokens x vocab logits ever exist; 0: all at once. Has no effect where logits are returned.
        return_logits: also return the logits.
    """
    if targets is None or return_logits or tile_tokens == 0:
        return read_log_probs(F.linear(hidden, weight), targets, return_logits=return_logits)
    tiles = (
        checkpoint(_tile_log_probs, hidden_tile, weight, targets_tile, use_reentrant=False)
        for hidden_tile, targets_tile in zip(*_split(hidden, targets, tile_tokens), strict=True)
    )
    log_prob, logsumexp = (_joined(parts, targets) for parts in zip(*tiles, strict=True))
    return TokenLogProbs(log_prob, logsumexp)


def read_log_probs(logits: Tensor, targets: Tensor | None, *, return_logits: bool = False) -> TokenLogProbs:
    """Read the log-probabilities of the targets off logits.

    Args:
        logits: (batch, seq, vocab).
        targets: (batch, seq) int64, -100 where ignored; None: only the logits are returned, always.
        return_logits: also return the logits.
    """
    if targets is None:
        empty = logits.new_empty((logits.shape[0], 0), dtype=torch.float32)
        return TokenLogProbs(empty, empty, logits)
    # On a CPU the allocator returns large buffers to the kernel, and faulting them in anew takes half the loss's time.
    chunk = max(1, _CPU_CHUNK_ELEMENTS // logits.shape[-1]) if logits.device.type == "cpu" else 0
    parts = zip(*map(_log_probs, *_split(logits, targets, chunk)), strict=True)
    log_prob, logsumexp = (_joined(part, targets) for part in parts)
    return TokenLogProbs(log_prob, logsumexp, logits if return_logits else None)


def _split(states: Tensor, targets: Tensor, tile_tokens: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Flatten (batch, seq, features) and (batch, seq) over positions and cut them into tiles; 0: one tile."""
    tile_tokens = tile_tokens or max(1, targets.numel())
    return torch.split(states.flatten(0, 1), tile_tokens), torch.split(targets.flatten(), tile_tokens)


def _joined(parts: Sequence[Tensor], targets: Tensor) -> Tensor:
    """(batch, seq) from the (tokens,) of each tile; a copy, because FSDP2 warns of outputs that are views."""
    return torch.cat(list(parts)).view(targets.shape).clone()


def _tile_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return _log_probs(F.linear(hidden, weight), targets)


def _log_probs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and log-sum-exps, (tokens,) float32 each, of (tokens, vocab) logits.

    The fused cross-entropy is half the time of a log-sum-exp and a gather; adding the target's logit back gives the
    log-sum-exp, whose backward pass costs nothing unless a loss uses it.
    """
    logits = logits.float()
    ignored = targets == IGNORED_TARGET
    targets = targets.masked_fill(ignored, 0)
    cross_entropy = F.cross_entropy(logits, targets, reduction="none")
    logsumexp = cross_entropy + logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return -cross_entropy.masked_fill(ignored, 0.0), logsumexp
