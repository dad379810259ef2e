"""The one thing objectives ask of a language model: the log-probability of given tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from foundry.models.tensor_parallel import VocabularyShard

IGNORED_TARGET = -100
"""A target that counts for nothing: PyTorch's and transformers' convention."""

_CPU_CHUNK_ELEMENTS = 2**21


@dataclass(frozen=True)
class TokenLogProbs:
    """What a causal model says about target tokens; differentiable through every field, or through `loss` alone.

    Attributes:
        log_prob: (batch, seq) float32, log p(target); exactly 0 at ignored targets. (batch, 0) without targets.
        logsumexp: (batch, seq) float32, log-sum-exp of the logits, at ignored targets too. (batch, 0) without targets.
        logits: (batch, seq, vocab) in the compute dtype, where asked for.
        read: (batch, seq, ...) by name, what was read off the logits besides, where asked for.
        loss: () float32, the sum that a `TokenLoss` asks for.
        correct: (batch, seq) bool, whether the likeliest token is the target, where a `TokenLoss` asks for it.
    """

    log_prob: Tensor
    logsumexp: Tensor
    logits: Tensor | None = None
    read: dict[str, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None
    correct: Tensor | None = None


Read = Callable[..., dict[str, Tensor]]
"""Reads something off (tokens, vocab) float32 logits, given the (tokens,) targets: (tokens, ...) each, by name.

Whatever else is given for each token, (tokens, ...) each, are further arguments.

It is called tile by tile, and again in the backward pass where logits are recomputed, so that they never exist at once.
"""


def project_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor | None,
    *,
    tile_tokens: int = 0,
    return_logits: bool = False,
    read: Read | None = None,
    per_token: Sequence[Tensor] = (),
) -> TokenLogProbs:
    """Project hidden states onto the vocabulary and read off the log-probabilities of the targets in fp32.

    Where the vocabulary is divided over ranks, logits are gathered only for what is read off them besides, tile by
    tile, or where they are returned.

    Args:
        hidden: (batch, seq, hidden_size), equal on ranks that divide the vocabulary.
        weight: (vocab, hidden_size), the head's matrix; a DTensor where the vocabulary is divided.
        targets: (batch, seq) int64, -100 where ignored; None: only logits are computed.
        tile_tokens: positions projected at a time and recomputed in the backward pass, so that no more than
            tile_tokens x vocab logits ever exist; 0: all at once. Has no effect where logits are returned.
        return_logits: also return the logits.
        read: what else is read off them.
        per_token: (batch, seq, ...) each, what `read` is given besides.
    """
    weight, shard = VocabularyShard.of(weight)
    if shard is not None:
        hidden = shard.enter(hidden)
    if targets is None or return_logits or tile_tokens == 0:
        logits = F.linear(hidden, weight)
        if shard is not None and (targets is None or return_logits):
            logits, shard = shard.gather(logits), None
        asked: dict[str, Any] = {"return_logits": return_logits, "read": read, "per_token": per_token}
        return read_log_probs(logits, targets, shard=shard, **asked)
    tiles = [
        checkpoint(_tile_log_probs, hidden_tile, weight, read, shard, *others, use_reentrant=False)
        for hidden_tile, *others in zip(*_split(tile_tokens, hidden, targets, *per_token), strict=True)
    ]
    return _joined(tiles, targets)


def read_log_probs(
    logits: Tensor,
    targets: Tensor | None,
    *,
    tile_tokens: int = 0,
    return_logits: bool = False,
    read: Read | None = None,
    per_token: Sequence[Tensor] = (),
    shard: VocabularyShard | None = None,
) -> TokenLogProbs:
    """Read the log-probabilities of the targets off logits.

    Args:
        logits: (batch, seq, vocab), or this rank's of a vocabulary that is divided.
        targets: (batch, seq) int64, -100 where ignored; None: only the logits are returned, always.
        tile_tokens: positions read at a time, and again in the backward pass, so that what is made of them in fp32 does
            not exist at once; 0: all.
        return_logits: also return the logits.
        read: what else is read off them.
        per_token: (batch, seq, ...) each, what `read` is given besides.
        shard: the entries of the vocabulary that the logits are of; None: all. Logits are not returned then.
    """
    if targets is None:
        empty = logits.new_empty((logits.shape[0], 0), dtype=torch.float32)
        return TokenLogProbs(empty, empty, logits)
    if tile_tokens:
        tiles = [
            checkpoint(_log_probs, logits_tile, read, shard, *others, use_reentrant=False)
            for logits_tile, *others in zip(*_split(tile_tokens, logits, targets, *per_token), strict=True)
        ]
        return _joined(tiles, targets, logits if return_logits else None)
    # On a CPU the allocator returns large buffers to the kernel, and faulting them in anew takes half the loss's time.
    chunk = max(1, _CPU_CHUNK_ELEMENTS // logits.shape[-1]) if logits.device.type == "cpu" else 0
    tiles = [
        _log_probs(logits_tile, read, shard, *others)
        for logits_tile, *others in zip(*_split(chunk, logits, targets, *per_token), strict=True)
    ]
    return _joined(tiles, targets, logits if return_logits else None)


def _split(tile_tokens: int, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Flatten (batch, seq, ...) over positions and cut each into tiles of so many; 0: one tile."""
    flat = [tensor.flatten(0, 1) for tensor in tensors]
    return [torch.split(tensor, tile_tokens or max(1, len(tensor))) for tensor in flat]


_Tile = tuple[Tensor, Tensor, dict[str, Tensor]]


def _joined(tiles: Sequence[_Tile], targets: Tensor, logits: Tensor | None = None) -> TokenLogProbs:
    """(batch, seq, ...) from the (tokens, ...) of each tile."""
    log_probs, logsumexps, reads = zip(*tiles, strict=True)
    read = {name: _whole([tile[name] for tile in reads], targets) for name in reads[0]}
    return TokenLogProbs(_whole(log_probs, targets), _whole(logsumexps, targets), logits, read)


def _whole(parts: Sequence[Tensor], targets: Tensor) -> Tensor:
    """A copy, because FSDP2 warns of outputs that are views."""
    whole = torch.cat(list(parts))
    return whole.view(*targets.shape, *whole.shape[1:]).clone()


def _tile_log_probs(
    hidden: Tensor, weight: Tensor, read: Read | None, shard: VocabularyShard | None, *others: Tensor
) -> _Tile:
    return _log_probs(F.linear(hidden, weight), read, shard, *others)


def _log_probs(
    logits: Tensor, read: Read | None, shard: VocabularyShard | None, targets: Tensor, *per_token: Tensor
) -> _Tile:
    """Log-probabilities and log-sum-exps, (tokens,) float32 each, of (tokens, vocab) logits, and what `read` reads.

    The fused cross-entropy is half the time of a log-sum-exp and a gather; adding the target's logit back gives the
    log-sum-exp, whose backward pass costs nothing unless a loss uses it.
    """
    logits = logits.float()
    others = {} if read is None else read(logits if shard is None else shard.gather(logits), targets, *per_token)
    ignored = targets == IGNORED_TARGET
    targets = targets.masked_fill(ignored, 0)
    if shard is not None:
        log_prob, logsumexp = _divided_log_probs(logits, targets, shard)
        return log_prob.masked_fill(ignored, 0.0), logsumexp, others
    cross_entropy = F.cross_entropy(logits, targets, reduction="none")
    logsumexp = cross_entropy + logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return -cross_entropy.masked_fill(ignored, 0.0), logsumexp, others


def _divided_log_probs(logits: Tensor, targets: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """The same of this rank's (tokens, entries) logits: a maximum and two sums for each token go over the ranks."""
    highest = shard.highest_(logits.detach().amax(-1))
    places, is_own = shard.find(targets)
    shifted = logits - highest[:, None]
    of_target = shifted.gather(-1, places[:, None])[:, 0].where(is_own, 0.0)
    of_target, sums = shard.sum(torch.stack((of_target, shifted.exp().sum(-1))))
    return of_target - sums.log(), highest + sums.log()
