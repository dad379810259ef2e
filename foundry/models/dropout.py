"""Dropout keyed by sample: the same in whatever microbatch, on whatever rank, and when recomputed."""

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
        keys: (batch,) int64, of samples; other layers and places in a layer are derived from them by `fold`.
    """

    keys: Tensor

    def fold(self, number: int) -> "KeyedDropout":
        """Draws for something else of the same samples, such as another layer."""
        return KeyedDropout(_mix(self.keys ^ ~number))

    def hidden(self, x: Tensor, probability: float) -> Tensor:
        """Drop elements of x: (batch, seq, hidden_size), and scale up the others."""
        seq_len, size = x.shape[1:]
        places = torch.arange(seq_len * size, device=x.device).view(seq_len, size)
        return self._drop(x, probability, places)

    def attention(self, weights: Tensor, probability: float) -> Tensor:
        """Drop elements of attention weights: (batch, heads, seq, seq), and scale up the others."""
        heads, queries, keys = (torch.arange(size, device=weights.device) for size in weights.shape[1:])
        places = (heads[:, None, None] << 2 * _POSITION_BITS) + (queries[:, None] << _POSITION_BITS) + keys
        return self._drop(weights, probability, places)

    def _drop(self, x: Tensor, probability: float, places: Tensor) -> Tensor:
        keys = self.keys.view(-1, *(1 for _ in places.shape))
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
