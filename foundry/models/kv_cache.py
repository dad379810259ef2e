"""Keys and values of the tokens that a model has read already, so that it reads each only once."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from foundry.models.varlen import DocumentBounds, has_kernel


class Cache(ABC):
    """How far the sequences of a batch have been read; a model's own kind of cache holds what it keeps of them.

    Sequences of different lengths end at the same column. What a shorter one lacks on the left is padding: no token
    attends to it, and it attends to itself alone. Positions count the tokens of the sequence.

    Args:
        length: columns at most.
        padding: (batch,) int64, columns of padding of each sequence; None: they have the same length.

    Attributes:
        filled: columns that have been read.
    """

    def __init__(self, length: int, padding: Tensor | None = None) -> None:
        self.length, self.padding = length, padding
        self.filled = 0

    def positions(self, batch: int, seq_len: int, device: torch.device) -> Tensor:
        """Positions of the next columns, (batch, seq_len) int64; 0 for padding."""
        columns = torch.arange(self.filled, self.filled + seq_len, device=device).expand(batch, -1)
        return columns if self.padding is None else (columns - self.padding[:, None]).clamp(min=0)

    def advance(self, seq_len: int) -> None:
        """Note that so many more columns have been read."""
        self.filled += seq_len

    def keep(self, rows: Tensor) -> None:
        """Have these sequences instead; rows: (kept,) int64, ascending, and several times where several go on."""
        self.padding = None if self.padding is None else self.padding[rows]
        self._keep(rows)

    @abstractmethod
    def _keep(self, rows: Tensor) -> None: ...


class KVCache(Cache):
    """Keys and values of each layer, in memory that is allocated once.

    Args:
        num_layers: of the model.
        length: columns at most.
        padding: as in `Cache`.
    """

    def __init__(self, num_layers: int, length: int, padding: Tensor | None = None) -> None:
        super().__init__(length, padding)
        self.layers = [LayerCache(self) for _ in range(num_layers)]

    def mask(self, seq_len: int, device: torch.device) -> Tensor | None:
        """Which columns the next ones attend to, (batch or 1, 1, seq_len, filled + seq_len) bool.

        Returns:
            None where there is no padding and only one column, or none before it, is read: causal attention says it.
        """
        if self.padding is None and (seq_len == 1 or self.filled == 0):
            return None
        columns = torch.arange(self.filled + seq_len, device=device)
        rows = columns[self.filled :, None]
        causal = columns <= rows
        if self.padding is None:
            return causal[None, None]
        is_token = columns >= self.padding[:, None, None]
        return ((causal & is_token) | (columns == rows)).unsqueeze(1)

    def bounds(self, seq_len: int, device: torch.device, dtype: torch.dtype, head_dim: int) -> DocumentBounds | None:
        """Where sequences of different lengths begin, if the next columns are the first and a kernel can attend so.

        Args:
            seq_len: columns to read.
            device: of the queries.
            dtype: of the queries.
            head_dim: of the queries.
        """
        if self.padding is None or self.filled > 0 or not has_kernel(device, dtype, head_dim):
            return None
        return DocumentBounds.of_padded(self.padding, seq_len)

    def _keep(self, rows: Tensor) -> None:
        for layer in self.layers:
            layer.keep(rows)


class LayerCache:
    """The keys and values of one layer.

    Args:
        whole: says how many columns are filled.
    """

    def __init__(self, whole: KVCache) -> None:
        self._whole = whole
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the next columns' keys and values, (batch, heads, seq, head_dim) each; returns those of all columns."""
        shape = (*key.shape[:2], self._whole.length, key.shape[3])
        if self._keys is None or self._values is None:
            self._keys, self._values = key.new_zeros(shape), value.new_zeros(shape)
        start, end = self._whole.filled, self._whole.filled + key.shape[2]
        self._keys[:, :, start:end] = key
        self._values[:, :, start:end] = value
        return self._keys[:, :, :end], self._values[:, :, :end]

    def keep(self, rows: Tensor) -> None:
        """Forget all sequences but some."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys[rows], self._values[rows]
