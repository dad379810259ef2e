"""Log-probabilities of target tokens, the interface between language models and objectives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foundry.models.recomputation import recomputed
from foundry.models.tensor_parallel import VocabularyShard

IGNORED_TARGET = -100
"""Target value of positions that are excluded from the loss, as in PyTorch and transformers."""

_CPU_CHUNK_ELEMENTS = 2**21


@dataclass(frozen=True)
class TokenLogProbs:
    """Output of a causal language model for target tokens.

    All fields but `correct` are differentiable; if `loss` is set, only `loss` is.

    Attributes:
        log_prob: (batch, seq) float32, log p(target); exactly 0 at ignored targets. (batch, 0) without targets.
        logsumexp: (batch, seq) float32, log-sum-exp of the logits, also at ignored targets. (batch, 0) without targets.
        logits: (batch, seq, vocab) in the compute dtype; None unless requested.
        read: (batch, seq, ...) each, by name: the further values that a `Read` function computed from the logits.
        loss: () float32, the sum defined by a `TokenLoss`; None without one.
        correct: (batch, seq) bool, whether the argmax of the logits equals the target; None unless a `TokenLoss`
            requests it.
    """

    log_prob: Tensor
    logsumexp: Tensor
    logits: Tensor | None = None
    read: dict[str, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None
    correct: Tensor | None = None


Read = Callable[..., dict[str, Tensor]]
"""Function that computes further values from the logits.

It takes (tokens, vocab) float32 logits, the (tokens,) targets and any further per-token tensors, (tokens, ...) each,
and returns tensors of shape (tokens, ...), by name.

It is called tile by tile, and again in the backward pass if logits are recomputed, so that the full logits never exist.
"""


def project_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor | None,
    *,
    softcap: float | None = None,
    tile_tokens: int = 0,
    return_logits: bool = False,
    read: Read | None = None,
    per_token: Sequence[Tensor] = (),
) -> TokenLogProbs:
    """Project hidden states onto the vocabulary and compute the log-probabilities of the targets in fp32.

    If the vocabulary is sharded over ranks, logits are gathered only to call `read`, tile by tile, or to return them.

    Args:
        hidden: (batch, seq, hidden_size), identical on ranks that shard the vocabulary.
        weight: (vocab, hidden_size), weight matrix of the head; a DTensor if the vocabulary is sharded.
        targets: (batch, seq) int64, -100 where ignored; None computes only the logits.
        softcap: bound of the logits, as for `soft_capped`; None for none.
        tile_tokens: positions projected at a time and recomputed in the backward pass, so that at most tile_tokens x
            vocab logits exist at once; 0 projects all at once. Ignored if logits are returned.
        return_logits: also return the logits.
        read: function that computes further values from the logits.
        per_token: (batch, seq, ...) each, further arguments of `read`.
    """
    weight, shard = VocabularyShard.of(weight)
    if shard is not None:
        hidden = shard.enter(hidden)
    if targets is None or return_logits or tile_tokens == 0:
        logits = F.linear(hidden, weight)
        if shard is not None and (targets is None or return_logits):
            logits, shard = shard.gather(logits), None
        output_options: dict[str, Any] = {"return_logits": return_logits, "read": read, "per_token": per_token}
        return read_log_probs(logits, targets, softcap=softcap, shard=shard, **output_options)
    tiles = [
        recomputed(_tile_log_probs, hidden_tile, weight, softcap, read, shard, *others)
        for hidden_tile, *others in zip(*_split(tile_tokens, hidden, targets, *per_token), strict=True)
    ]
    return _join_tiles(tiles, targets)


def read_log_probs(
    logits: Tensor,
    targets: Tensor | None,
    *,
    softcap: float | None = None,
    tile_tokens: int = 0,
    return_logits: bool = False,
    read: Read | None = None,
    per_token: Sequence[Tensor] = (),
    shard: VocabularyShard | None = None,
) -> TokenLogProbs:
    """Compute the log-probabilities of the targets from logits.

    Args:
        logits: (batch, seq, vocab), or this rank's shard of a sharded vocabulary.
        targets: (batch, seq) int64, -100 where ignored; None returns only the logits, regardless of `return_logits`.
        softcap: bound of the logits, as for `soft_capped`, which is applied to them first; None for none.
        tile_tokens: positions processed at a time and recomputed in the backward pass, so that fp32 intermediates exist
            for one tile only; 0 processes all at once.
        return_logits: also return the logits.
        read: function that computes further values from the logits.
        per_token: (batch, seq, ...) each, further arguments of `read`.
        shard: vocabulary entries that the logits cover; None if they cover all. Requires targets and no
            `return_logits`.
    """
    if targets is None:
        empty = logits.new_empty((logits.shape[0], 0), dtype=torch.float32)
        return TokenLogProbs(empty, empty, soft_capped(logits, softcap))
    returned = soft_capped(logits, softcap) if return_logits else None
    if tile_tokens:
        tiles = [
            recomputed(_log_probs, logits_tile, softcap, read, shard, *others)
            for logits_tile, *others in zip(*_split(tile_tokens, logits, targets, *per_token), strict=True)
        ]
        return _join_tiles(tiles, targets, returned)
    # Small chunks on a CPU: the allocator returns large buffers to the kernel, and page faults on new buffers would
    # take half the time of the loss.
    chunk = max(1, _CPU_CHUNK_ELEMENTS // logits.shape[-1]) if logits.device.type == "cpu" else 0
    tiles = [
        _log_probs(logits_tile, softcap, read, shard, *others)
        for logits_tile, *others in zip(*_split(chunk, logits, targets, *per_token), strict=True)
    ]
    return _join_tiles(tiles, targets, returned)


def soft_capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return softcap x tanh(logits / softcap), between -softcap and softcap, or the logits if `softcap` is None.

    It is computed in float32 or wider, and has the shape and dtype of `logits` (Gemma Team, 2024, arXiv:2408.00118).
    """
    if softcap is None:
        return logits
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (softcap * (exact / softcap).tanh()).to(logits.dtype)


def _split(tile_tokens: int, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Flatten batch and seq of each (batch, seq, ...) tensor, and split the result into tiles of `tile_tokens`.

    A `tile_tokens` of 0 gives a single tile.
    """
    flat = [tensor.flatten(0, 1) for tensor in tensors]
    return [torch.split(tensor, tile_tokens or max(1, len(tensor))) for tensor in flat]


_Tile = tuple[Tensor, Tensor, dict[str, Tensor]]


def _join_tiles(tiles: Sequence[_Tile], targets: Tensor, logits: Tensor | None = None) -> TokenLogProbs:
    """Concatenate the (tokens, ...) outputs of the tiles into (batch, seq, ...) tensors."""
    log_probs, logsumexps, reads = zip(*tiles, strict=True)
    read = {name: _join([tile[name] for tile in reads], targets) for name in reads[0]}
    return TokenLogProbs(_join(log_probs, targets), _join(logsumexps, targets), logits, read)


def _join(parts: Sequence[Tensor], targets: Tensor) -> Tensor:
    """Concatenate tiles and copy the result, because FSDP2 warns about outputs that are views."""
    joined = torch.cat(list(parts))
    return joined.view(*targets.shape, *joined.shape[1:]).clone()


def _tile_log_probs(
    hidden: Tensor,
    weight: Tensor,
    softcap: float | None,
    read: Read | None,
    shard: VocabularyShard | None,
    *others: Tensor,
) -> _Tile:
    return _log_probs(F.linear(hidden, weight), softcap, read, shard, *others)


def _log_probs(
    logits: Tensor,
    softcap: float | None,
    read: Read | None,
    shard: VocabularyShard | None,
    targets: Tensor,
    *per_token: Tensor,
) -> _Tile:
    """Return log-probabilities and log-sum-exps, (tokens,) float32 each, and the output of `read`.

    The fused cross-entropy takes half the time of a log-sum-exp and a gather. Adding the target's logit to it gives the
    log-sum-exp, whose backward pass is free unless a loss uses it.
    """
    logits = soft_capped(logits.float(), softcap)
    values = {} if read is None else read(logits if shard is None else shard.gather(logits), targets, *per_token)
    ignored = targets == IGNORED_TARGET
    targets = targets.masked_fill(ignored, 0)
    if shard is not None:
        log_prob, logsumexp = _divided_log_probs(logits, targets, shard)
        return log_prob.masked_fill(ignored, 0.0), logsumexp, values
    cross_entropy = F.cross_entropy(logits, targets, reduction="none")
    logsumexp = cross_entropy + logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return -cross_entropy.masked_fill(ignored, 0.0), logsumexp, values


def _divided_log_probs(logits: Tensor, targets: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and log-sum-exps from this rank's (tokens, entries) logits.

    The ranks exchange one maximum and two sums per token.
    """
    highest = shard.highest_(logits.detach().amax(-1))
    places, is_own = shard.find(targets)
    shifted = logits - highest[:, None]
    target_logits = shifted.gather(-1, places[:, None])[:, 0].where(is_own, 0.0)
    target_logits, sums = shard.sum(torch.stack((target_logits, shifted.exp().sum(-1))))
    return target_logits - sums.log(), highest + sums.log()
