"""Key-value caches, so that generation processes each token only once."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from foundry.models.attention.varlen import DocumentBounds, has_kernel
from foundry.models.decoder.shared_columns import SharedColumns


class Cache(ABC):
    """Number of cached columns of a batch of sequences; subclasses hold the cached tensors.

    Sequences of different lengths end at the same column, and shorter ones are left-padded. No token attends to
    padding, and a padding column attends only to itself. Positions count the tokens of a sequence without padding.

    Args:
        length: maximum number of columns.
        padding: (batch,) int64, padding columns of each sequence; None if all have the same length.

    Attributes:
        filled: number of columns in the cache.
        can_merge: whether `merge` is implemented, which adds sequences to a cache in use.
    """

    can_merge: bool = False

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
        """Select the sequences to keep; a cache that can merge drops columns that are padding in all of them.

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

    def merge(self, newcomers: Self, length: int) -> None:
        """Append the sequences of another cache of the same model, which must not be used afterwards.

        Args:
            newcomers: the other cache; `expand` has been called on both or on neither.
            length: maximum number of columns from now on.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be merged")

    @abstractmethod
    def _keep(self, rows: Tensor) -> None: ...

    def _drop_padding(self) -> int:
        """Count out the columns that are padding in all sequences; return their number."""
        if self.padding is None:
            return 0
        unused = int(self.padding.min())
        self.filled, self.padding = self.filled - unused, _none_if_zero(self.padding - unused)
        return unused

    def _align(self, newcomers: Self, counts: Sequence[int], device: torch.device) -> None:
        """Add the sequences of another cache to the padding, and set the number of columns.

        Args:
            newcomers: the other cache.
            counts: number of sequences of this cache and of the other one.
            device: device of the padding.
        """
        width, parts = max(self.filled, newcomers.filled), list[Tensor]()
        for cache, count in zip((self, newcomers), counts, strict=True):
            padding = torch.zeros(count, dtype=torch.int64, device=device) if cache.padding is None else cache.padding
            parts.append(padding + width - cache.filled)
        self.filled, self.padding = width, _none_if_zero(torch.cat(parts))


def join_right_aligned(parts: Sequence[Tensor], length: int | None = None) -> Tensor:
    """Return the columns of all sequences, (sequences, heads, length, head_dim); the other columns are zero.

    Args:
        parts: (sequences, heads, columns, head_dim) each; all end at the same column.
        length: number of columns of the result; None for the largest number of columns in `parts`.
    """
    width = max(part.shape[2] for part in parts)
    shape = sum(map(len, parts)), parts[0].shape[1], width if length is None else length, parts[0].shape[3]
    joined, start = parts[0].new_zeros(shape), 0
    for part in parts:
        joined[start : start + len(part), :, width - part.shape[2] : width] = part
        start += len(part)
    return joined


def _none_if_zero(padding: Tensor) -> Tensor | None:
    return padding if bool(padding.any()) else None


class KVCache(Cache):
    """Keys and values of each layer, in memory allocated once.

    Args:
        num_layers: number of layers of the model.
        length: maximum number of columns.
        padding: as in `Cache`.

    Attributes:
        layers: cache of each layer.
        shared: columns that several continuations share; None before `expand`.
        rotary: cosines and sines of the first positions, (positions, head_dim) each, which the model computes once;
            None before its first call.
    """

    can_merge = True

    def __init__(self, num_layers: int, length: int, padding: Tensor | None = None) -> None:
        super().__init__(length, padding)
        self.layers = [LayerCache(self) for _ in range(num_layers)]
        self.shared: SharedColumns | None = None
        self.rotary: tuple[Tensor, Tensor] | None = None

    def expand(self, rows: Tensor) -> None:
        """Give several continuations to sequences that have been read once; arguments as in `Cache`.

        In float32 the continuations share the columns of their sequence. In half precision the columns are copied, so
        that attention is computed by kernels that do not round its scores to half precision.
        """
        if any(layer.dtype is not torch.float32 for layer in self.layers):
            self.keep(rows)
            return
        padding = rows.new_zeros(int(rows.max()) + 1) if self.padding is None else self.padding
        self.shared = SharedColumns(self.filled, padding, rows)
        for layer in self.layers:
            layer.share()
        self.padding = None if self.padding is None else self.padding[rows]

    def merge(self, newcomers: Self, length: int) -> None:
        """Append the sequences of another cache; arguments as in `Cache`."""
        assert (self.shared is None) == (newcomers.shared is None)
        counts = [len(cache.layers[0].own_columns()[0]) for cache in (self, newcomers)]
        for layer, other in zip(self.layers, newcomers.layers, strict=True):
            layer.merge(other, length)
        if self.shared is None or newcomers.shared is None:
            self._align(newcomers, counts, self.layers[0].device)
        else:
            columns, other_columns = self.filled - self.shared.count, newcomers.filled - newcomers.shared.count
            self.shared = self.shared.merge(newcomers.shared, columns, other_columns)
            self.filled = self.shared.count + max(columns, other_columns)
            self.padding = _none_if_zero(self.shared.total_padding)
        self.length = length

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
        end = self.filled
        if self.shared is None:
            first = self._drop_padding()
        else:
            end -= self.shared.count
            first = self._keep_shared(rows, self.shared)
        for layer in self.layers:
            layer.keep(rows, first, end)

    def _keep_shared(self, rows: Tensor, shared: SharedColumns) -> int:
        """Keep the shared columns of some continuations; return how many columns after these are dropped."""
        first = int(shared.own_padding[rows].min())
        self.shared, sequences = shared.keep(rows)
        unused = shared.count - self.shared.count
        for layer in self.layers:
            layer.keep_shared(sequences, unused)
        self.length, self.filled = self.length - unused, self.filled - unused - first
        self.padding = _none_if_zero(self.shared.total_padding)
        return first


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
    def device(self) -> torch.device:
        """Device of the cached numbers; the cache must not be empty."""
        return self.own_columns()[0].device

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

    def keep_shared(self, sequences: Tensor, first: int) -> None:
        """Select shared columns.

        Args:
            sequences: (kept,) int64, the sequences whose shared columns to keep.
            first: first column to keep.
        """
        assert self._shared is not None
        keys, values = self._shared
        self._shared = keys[:, :, first:][sequences], values[:, :, first:][sequences]

    def keep(self, rows: Tensor, first: int, end: int) -> None:
        """Select continuations and their columns that are not shared.

        Args:
            rows: (kept,) int64, the continuations to keep.
            first: first column to keep.
            end: end of the filled columns.
        """
        if self._keys is not None and self._values is not None:
            length = self._keys.shape[2]
            self._keys = join_right_aligned([self._keys[:, :, first:end][rows]], length)
            self._values = join_right_aligned([self._values[:, :, first:end][rows]], length)

    def merge(self, other: "LayerCache", length: int) -> None:
        """Move the sequences of the same layer of another cache here; `length` is as in `Cache.merge`."""
        own, other_own = self.own_columns(), other.own_columns()
        if self._shared is not None and other._shared is not None:
            (keys, values), (other_keys, other_values) = self._shared, other._shared
            self._shared = join_right_aligned([keys, other_keys]), join_right_aligned([values, other_values])
            length -= self._shared[0].shape[2]
        self._keys, self._values = (join_right_aligned(parts, length) for parts in zip(own, other_own, strict=True))
        other._keys = other._values = other._shared = None

    def own_columns(self) -> tuple[Tensor, Tensor]:
        """Return the filled columns that are not shared, of keys and of values."""
        cache = self._model_cache
        first = 0 if cache.shared is None else cache.shared.count
        if self._keys is not None and self._values is not None:
            return self._keys[:, :, : cache.filled - first], self._values[:, :, : cache.filled - first]
        assert self._shared is not None
        assert cache.shared is not None
        keys, values = (part[:1, :, :0].expand(len(cache.shared.rows), -1, -1, -1) for part in self._shared)
        return keys, values
