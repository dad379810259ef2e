"""Key-value caches, so that generation processes each token only once."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from foundry.models.varlen import DocumentBounds, has_kernel


class Cache(ABC):
    """Number of cached columns of a batch of sequences; subclasses hold the cached tensors.

    Sequences of different lengths end at the same column, and shorter ones are left-padded. No token attends to
    padding, and a padding column attends only to itself. Positions count the tokens of a sequence without padding.

    Args:
        length: maximum number of columns.
        padding: (batch,) int64, padding columns of each sequence; None if all have the same length.

    Attributes:
        filled: number of columns in the cache.
    """

    def __init__(self, length: int, padding: Tensor | None = None) -> None:
        self.length, self.padding = length, padding
        self.filled = 0

    def positions(self, batch: int, seq_len: int, device: torch.device) -> Tensor:
        """Return the positions of the next columns, (batch, seq_len) int64; 0 for padding."""
        columns = torch.arange(self.filled, self.filled + seq_len, device=device).expand(batch, -1)
        return columns if self.padding is None else (columns - self.padding[:, None]).clamp(min=0)

    def advance(self, seq_len: int) -> None:
        """Record that `seq_len` more columns are in the cache."""
        self.filled += seq_len

    def keep(self, rows: Tensor) -> None:
        """Select the sequences to keep.

        Args:
            rows: (kept,) int64, ascending indices of the sequences; a repeated index duplicates a sequence.
        """
        self.padding = None if self.padding is None else self.padding[rows]
        self._keep(rows)

    @abstractmethod
    def _keep(self, rows: Tensor) -> None: ...


class KVCache(Cache):
    """Keys and values of each layer, in memory allocated once.

    Args:
        num_layers: number of layers of the model.
        length: maximum number of columns.
        padding: as in `Cache`.
    """

    def __init__(self, num_layers: int, length: int, padding: Tensor | None = None) -> None:
        super().__init__(length, padding)
        self.layers = [LayerCache(self) for _ in range(num_layers)]

    def mask(self, seq_len: int, device: torch.device) -> Tensor | None:
        """Return the attention mask of the next columns, (batch or 1, 1, seq_len, filled + seq_len) bool.

        Returns:
            The mask. None if causal attention needs no mask, because no sequence is padded and there is either a single
            new column or an empty cache.
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
        """Return the document bounds of left-padded sequences, for attention within the first `seq_len` columns.

        None if no sequence is padded, the cache is not empty, or the variable-length kernel does not support the
        device, dtype or head size.

        Args:
            seq_len: number of columns to process.
            device: device of the queries.
            dtype: dtype of the queries.
            head_dim: head size of the queries.
        """
        if self.padding is None or self.filled > 0 or not has_kernel(device, dtype, head_dim):
            return None
        return DocumentBounds.of_padded(self.padding, seq_len)

    def _keep(self, rows: Tensor) -> None:
        for layer in self.layers:
            layer.keep(rows)


class LayerCache:
    """Keys and values of one layer.

    Args:
        model_cache: the cache of the model, which holds the number of filled columns.
    """

    def __init__(self, model_cache: KVCache) -> None:
        self._model_cache = model_cache
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of the next columns, (batch, heads, seq, head_dim); return all cached columns."""
        shape = (*key.shape[:2], self._model_cache.length, key.shape[3])
        if self._keys is None or self._values is None:
            self._keys, self._values = key.new_zeros(shape), value.new_zeros(shape)
        start, end = self._model_cache.filled, self._model_cache.filled + key.shape[2]
        self._keys[:, :, start:end] = key
        self._values[:, :, start:end] = value
        return self._keys[:, :, :end], self._values[:, :, :end]

    def keep(self, rows: Tensor) -> None:
        """Select the sequences to keep."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys[rows], self._values[rows]
