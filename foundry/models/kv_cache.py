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

    def expand(self, rows: Tensor) -> None:
        """Give several continuations to sequences that have been read once.

        Args:
            rows: (continuations,) int64, index of the sequence of each continuation; each sequence has one.
        """
        self.keep(rows)

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
        self.shared: SharedColumns | None = None

    def expand(self, rows: Tensor) -> None:
        """Give several continuations to sequences that have been read once; arguments as in `Cache`.

        In float32 the continuations share the columns of their sequence. In half precision the columns are copied, so
        that attention is computed by kernels that do not round its scores to half precision.
        """
        if any(layer.dtype is not torch.float32 for layer in self.layers):
            self.keep(rows)
            return
        self.shared = SharedColumns(self.filled, self.padding, rows)
        for layer in self.layers:
            layer.share()
        self.padding = None if self.padding is None else self.padding[rows]

    def mask(self, seq_len: int, device: torch.device) -> Tensor | None:
        """Return the attention mask of the next columns, (batch or 1, 1, seq_len, filled + seq_len) bool.

        Returns:
            The mask. None if causal attention needs no mask, because no sequence is padded and there is either a single
            new column or an empty cache, or because sequences share columns.
        """
        if self.shared is not None or (self.padding is None and (seq_len == 1 or self.filled == 0)):
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
        if self.shared is not None:
            self.shared, sequences = self.shared.keep(rows)
            for layer in self.layers:
                layer.keep_shared(sequences)


class SharedColumns:
    """Columns of sequences that several continuations share.

    Args:
        count: number of shared columns.
        padding: (sequences,) int64, as in `Cache`.
        rows: (continuations,) int64, index of the sequence of each continuation; each sequence has one.
    """

    def __init__(self, count: int, padding: Tensor | None, rows: Tensor) -> None:
        self.count, self._padding, self._rows = count, padding, rows
        counts, order = rows.bincount(), rows.argsort(stable=True)
        self._shape = len(counts), int(counts.max())
        numbers = torch.empty_like(rows)
        numbers[order] = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows[order]]
        places = rows * self._shape[1] + numbers
        # Places of the continuations in a grid of sequences and their continuations; None if all are in order.
        is_grid = torch.equal(places, torch.arange(self._shape[0] * self._shape[1], device=rows.device))
        self._places = None if is_grid else places
        self._bias: Tensor | None = None
        if padding is not None:
            is_padding = torch.arange(count, device=rows.device) < padding[:, None]
            self._bias = torch.zeros(is_padding.shape, device=rows.device).masked_fill(is_padding, -torch.inf)

    def keep(self, rows: Tensor) -> tuple["SharedColumns", Tensor]:
        """Return the shared columns of some continuations, and the indices of their sequences, (kept sequences,) int64.

        Args:
            rows: (kept,) int64, indices of the continuations.
        """
        sequences, indices = torch.unique(self._rows[rows], return_inverse=True)
        padding = None if self._padding is None else self._padding[sequences]
        return SharedColumns(self.count, padding, indices), sequences

    def attend(self, query: Tensor, key: Tensor, value: Tensor, shared_key: Tensor, shared_value: Tensor) -> Tensor:
        """Compute the attention of one new column to the shared columns and to the columns of each continuation.

        Args:
            query: (continuations, heads, 1, head_dim) float32.
            key: (continuations, kv heads, columns, head_dim), columns after the shared ones.
            value: same shape as `key`.
            shared_key: (sequences, kv heads, shared columns, head_dim).
            shared_value: same shape as `shared_key`.

        Returns:
            (continuations, heads, 1, head_dim).
        """
        by_kv_head = query.view(len(query), key.shape[1], -1, query.shape[-1]) * query.shape[-1] ** -0.5
        scores = torch.matmul(self._to_grid(by_kv_head), shared_key.transpose(-1, -2))
        if self._bias is not None:
            scores = scores + self._bias[:, None, None]
        own_scores = torch.matmul(by_kv_head, key.transpose(-1, -2))
        weights = torch.cat((self._from_grid(scores, by_kv_head.shape[2]), own_scores), dim=-1).softmax(-1)
        shared_weights, own_weights = torch.split(weights, [self.count, key.shape[2]], dim=-1)
        shared = torch.matmul(self._to_grid(shared_weights), shared_value)
        output = self._from_grid(shared, by_kv_head.shape[2]) + torch.matmul(own_weights, value)
        return output.reshape(query.shape)

    def _to_grid(self, rows: Tensor) -> Tensor:
        """Convert (continuations, kv heads, groups, n) to (sequences, kv heads, continuations * groups, n)."""
        if self._places is not None:
            grid = rows.new_zeros(self._shape[0] * self._shape[1], *rows.shape[1:])
            rows = grid.index_copy_(0, self._places, rows)
        return rows.view(*self._shape, *rows.shape[1:]).transpose(1, 2).flatten(2, 3)

    def _from_grid(self, grid: Tensor, num_groups: int) -> Tensor:
        """Convert (sequences, kv heads, continuations * groups, n) to (continuations, kv heads, groups, n)."""
        num_sequences, num_kv_heads, _, width = grid.shape
        by_continuation = grid.view(num_sequences, num_kv_heads, self._shape[1], num_groups, width)
        rows = by_continuation.transpose(1, 2).flatten(0, 1)
        return rows if self._places is None else rows[self._places]


class LayerCache:
    """Keys and values of one layer.

    Args:
        model_cache: the cache of the model, which holds the number of filled columns.
    """

    def __init__(self, model_cache: KVCache) -> None:
        self._model_cache = model_cache
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._shared: tuple[Tensor, Tensor] | None = None

    @property
    def dtype(self) -> torch.dtype | None:
        """Type of the cached numbers; None if the cache is empty."""
        return None if self._keys is None else self._keys.dtype

    def attend_shared(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
        """Compute attention to shared columns and to `key` and `value`; None if no columns are shared.

        Args:
            query: (batch, heads, 1, head_dim).
            key: (batch, kv heads, columns, head_dim), as returned by `append`.
            value: same shape as `key`.
        """
        if self._model_cache.shared is None:
            return None
        assert self._shared is not None
        return self._model_cache.shared.attend(query, key, value, *self._shared)

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of the next columns, (batch, heads, seq, head_dim); return all columns not shared."""
        cache = self._model_cache
        first = 0 if cache.shared is None else cache.shared.count
        shape = (*key.shape[:2], cache.length - first, key.shape[3])
        if self._keys is None or self._values is None:
            self._keys, self._values = key.new_zeros(shape), value.new_zeros(shape)
        start, end = cache.filled - first, cache.filled - first + key.shape[2]
        self._keys[:, :, start:end] = key
        self._values[:, :, start:end] = value
        return self._keys[:, :, :end], self._values[:, :, :end]

    def share(self) -> None:
        """Make all filled columns the shared ones; later columns are allocated anew."""
        assert self._keys is not None
        assert self._values is not None
        filled = self._model_cache.filled
        self._shared = self._keys[:, :, :filled].contiguous(), self._values[:, :, :filled].contiguous()
        self._keys = self._values = None

    def keep_shared(self, sequences: Tensor) -> None:
        """Select the sequences whose shared columns to keep, (kept,) int64."""
        assert self._shared is not None
        keys, values = self._shared
        self._shared = keys[sequences], values[sequences]

    def keep(self, rows: Tensor) -> None:
        """Select the sequences to keep."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys[rows], self._values[rows]
