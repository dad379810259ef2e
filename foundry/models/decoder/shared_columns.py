"""Attention to columns that several continuations of a sequence share."""

import torch
from torch import Tensor


class SharedColumns:
    """Columns of sequences that several continuations share, followed by the columns of each continuation.

    Args:
        count: number of shared columns.
        padding: (sequences,) int64, shared columns that are padding of each sequence.
        rows: (continuations,) int64, index of the sequence of each continuation; each sequence has one.
        own_padding: (continuations,) int64, columns after the shared ones that are padding of each continuation; None
            means 0.
    """

    def __init__(self, count: int, padding: Tensor, rows: Tensor, own_padding: Tensor | None = None) -> None:
        self.count, self.padding, self.rows = count, padding, rows
        self.own_padding = torch.zeros_like(rows) if own_padding is None else own_padding
        counts, order = rows.bincount(), rows.argsort(stable=True)
        self._shape = len(counts), int(counts.max())
        numbers = torch.empty_like(rows)
        numbers[order] = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows[order]]
        places = rows * self._shape[1] + numbers
        # Places of the continuations in a grid of sequences and their continuations; None if all are in order.
        is_grid = torch.equal(places, torch.arange(self._shape[0] * self._shape[1], device=rows.device))
        self._places = None if is_grid else places
        self._bias, self._own_bias = _padding_bias(self.padding), _padding_bias(self.own_padding)

    @property
    def total_padding(self) -> Tensor:
        """Padding of each continuation in all columns, (continuations,) int64."""
        return self.padding[self.rows] + self.own_padding

    def keep(self, rows: Tensor) -> tuple["SharedColumns", Tensor]:
        """Return the columns of some continuations, and the indices of their sequences, (kept sequences,) int64.

        The first columns are dropped, in each part, if they are padding of all kept sequences or continuations.

        Args:
            rows: (kept,) int64, indices of the continuations.
        """
        sequences, indices = torch.unique(self.rows[rows], return_inverse=True)
        padding, own_padding = self.padding[sequences], self.own_padding[rows]
        unused = int(padding.min())
        return SharedColumns(self.count - unused, padding - unused, indices, own_padding - own_padding.min()), sequences

    def merge(self, other: "SharedColumns", columns: int, other_columns: int) -> "SharedColumns":
        """Return the columns of the continuations of both, which all end at the same column.

        Args:
            other: columns of other sequences.
            columns: number of columns after the shared ones.
            other_columns: the same number of `other`.
        """
        count, width = max(self.count, other.count), max(columns, other_columns)
        padding = self.padding + count - self.count, other.padding + count - other.count
        own_padding = self.own_padding + width - columns, other.own_padding + width - other_columns
        rows = self.rows, other.rows + len(self.padding)
        return SharedColumns(count, torch.cat(padding), torch.cat(rows), torch.cat(own_padding))

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
            scores[..., : self._bias.shape[1]] += self._bias[:, None, None]
        own_scores = torch.matmul(by_kv_head, key.transpose(-1, -2))
        if self._own_bias is not None:
            own_scores[..., : self._own_bias.shape[1]] += self._own_bias[:, None, None]
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


def _padding_bias(padding: Tensor) -> Tensor | None:
    """Return the bias of attention scores to the columns that are padding in any row; None without padding.

    Args:
        padding: (rows,) int64, padding columns of each row, which come first.

    Returns:
        (rows, columns) float32, -inf for padding and otherwise 0.
    """
    columns = torch.arange(int(padding.max()), device=padding.device)
    if not len(columns):
        return None
    is_padding = columns < padding[:, None]
    return torch.zeros(is_padding.shape, device=padding.device).masked_fill(is_padding, -torch.inf)
