"""Dropout keyed by sample: masks do not depend on microbatch, rank or activation recomputation."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_STEP = 0x9E3779B97F4A7C15 - 2**64
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_POSITION_BITS = 22


@dataclass(frozen=True)
class KeyedDropout:
    """Dropout masks computed by hashing the sample's key and the element's position in the sample.

    Key and position do not depend on padding. The hash is SplitMix64 (Steele et al., 2014), seeded with the key.
    PyTorch's generators cannot be keyed by sample on the device, and a generator on the host would have to draw a
    random number for every activation.

    Args:
        keys: (batch, seq or 1) int64, key of each token's sample; keys for other layers and uses are derived with
            `fold`.
        positions: (batch or 1, seq) int64, position of each token in its sample.
    """

    keys: Tensor
    positions: Tensor

    def fold(self, number: int) -> "KeyedDropout":
        """Return independent masks for another use with the same samples, such as another layer."""
        return KeyedDropout(_mix(self.keys ^ ~number), self.positions)

    def hidden(self, x: Tensor, probability: float) -> Tensor:
        """Apply dropout to x: (batch, seq, hidden_size), scaling up the kept elements."""
        places = self.positions[..., None] * x.shape[-1] + torch.arange(x.shape[-1], device=x.device)
        return _drop(x, probability, self.keys[..., None], places)

    def attention(self, weights: Tensor, probability: float) -> Tensor:
        """Apply dropout to attention weights: (batch, heads, seq, seq), scaling up the kept elements."""
        heads = torch.arange(weights.shape[1], device=weights.device)
        queries = (heads[:, None] << _POSITION_BITS) + self.positions[:, None]
        places = (queries[..., None] << _POSITION_BITS) + self.positions[:, None, None]
        return _drop(weights, probability, self.keys[:, None, :, None], places)


def attend_with_dropout(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, probability: float, draws: KeyedDropout
) -> Tensor:
    """Compute attention with materialized weights, because fused kernels draw dropout masks from torch's generator.

    Args:
        query: (batch, heads, seq, head_dim).
        key: (batch, kv heads, seq, head_dim).
        value: as `key`.
        mask: (batch, 1, seq, seq) bool, true where a query may attend to a key; None for causal attention.
        probability: dropout probability of the attention weights.
        draws: dropout masks of this layer.
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
    """Apply SplitMix64's finalizer elementwise; products wrap around."""
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        values = (values ^ _shift_right(values, shift)) * factor
    return values ^ _shift_right(values, 31)


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; int64's own shift fills with the sign bit."""
    shifted: Tensor = (values >> bits) & (2 ** (64 - bits) - 1)
    return shifted
