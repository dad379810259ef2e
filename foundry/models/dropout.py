"""Dropout keyed by sample: the same in whatever microbatch, on whatever rank, and when recomputed."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_STEP = 0x9E3779B97F4A7C15 - 2**64
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_POSITION_BITS = 22


@dataclass(frozen=True)
class KeyedDropout:
    """Drops elements by a hash of their sample's key and their place in it; both are independent of padding.

    The hash is SplitMix64 (Steele et al., 2014), started at the key: torch's generators are keyed neither by sample nor
    on a device, and numbers drawn on the host would be as many as the activations.

    Args:
        keys: (batch, seq or 1) int64, of each token's sample; other layers and places in a layer are derived by `fold`.
        positions: (batch or 1, seq) int64, of each token in its sample.
    """

    keys: Tensor
    positions: Tensor

    def fold(self, number: int) -> "KeyedDropout":
        """Draws for something else of the same samples, such as another layer."""
        return KeyedDropout(_mix(self.keys ^ ~number), self.positions)

    def hidden(self, x: Tensor, probability: float) -> Tensor:
        """Drop elements of x: (batch, seq, hidden_size), and scale up the others."""
        places = self.positions[..., None] * x.shape[-1] + torch.arange(x.shape[-1], device=x.device)
        return _drop(x, probability, self.keys[..., None], places)

    def attention(self, weights: Tensor, probability: float) -> Tensor:
        """Drop elements of attention weights: (batch, heads, seq, seq), and scale up the others."""
        heads = torch.arange(weights.shape[1], device=weights.device)
        queries = (heads[:, None] << _POSITION_BITS) + self.positions[:, None]
        places = (queries[..., None] << _POSITION_BITS) + self.positions[:, None, None]
        return _drop(weights, probability, self.keys[:, None, :, None], places)


def attend_with_dropout(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, probability: float, draws: KeyedDropout
) -> Tensor:
    """Attention whose weights exist, because fused kernels draw from torch's generator.

    Args:
        query: (batch, heads, seq, head_dim).
        key: (batch, kv heads, seq, head_dim).
        value: as `key`.
        mask: (batch, 1, seq, seq) bool, which tokens attend to which; None: causal.
        probability: share of the weights that are dropped.
        draws: of this layer.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    dtype = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1, dtype=dtype)
    return draws.fold(2).attention(weights, probability).to(value.dtype) @ value


def _drop(x: Tensor, probability: float, keys: Tensor, places: Tensor) -> Tensor:
    bits = _shift_right(_mix(keys + places * _STEP), 11)
    return x.masked_fill(bits < round(probability * 2**53), 0.0) * (1 / (1 - probability))


def _mix(values: Tensor) -> Tensor:
    """SplitMix64's finaliser, elementwise; products wrap around."""
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        values = (values ^ _shift_right(values, shift)) * factor
    return values ^ _shift_right(values, 31)


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """A shift that fills with zeros; int64's own fills with the sign."""
    shifted: Tensor = (values >> bits) & (2 ** (64 - bits) - 1)
    return shifted
