"""Training rows that keep documents whole: best-fit packing of the documents of a token stream."""

import hashlib
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foundry.config.schemas.data import PackingStrategy
from foundry.data.conversations.examples import IGNORED_TARGET
from foundry.data.corpora.token_sequences import TokenArray, TokenSequences
from foundry.data.io.cached_folder import cached_folder

_FORMAT = 1
_PIECES, _BOUNDS = "pieces_{}.npy", "bounds_{}.npy"
_SCANNED_TOKENS = 2**24


class PackedSequences(TokenSequences):
    """Dataset whose rows consist of pieces of documents; the rest of a row is padding, whose targets are ignored.

    All tokens but the last are an input of exactly one row, with the next token of the stream as the target.

    Args:
        tokens: (num_tokens,) unsigned integers, usually memory-mapped.
        seq_len: tokens per row.
        pieces: (pieces, 2) int64, index of the first token and length of each piece, in the order of the rows.
        bounds: (rows + 1,) int64, index of the first piece of each row, then the number of pieces.
    """

    def __init__(self, tokens: TokenArray, seq_len: int, pieces: NDArray[np.int64], bounds: NDArray[np.int64]) -> None:
        super().__init__(tokens, seq_len)
        self.pieces, self.bounds = pieces, bounds

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.bounds) - 1

    @property
    def dropped_tokens(self) -> int:
        """Number of tokens that are no input: the last one, which is only a target."""
        return len(self.tokens) - int(self.pieces[:, 1].sum())

    @property
    def padding_tokens(self) -> int:
        """Number of tokens of padding in all rows."""
        return len(self) * self.seq_len - int(self.pieces[:, 1].sum())

    def num_tokens(self, indices: Sequence[int]) -> int:
        """Return the total tokens of these rows, without padding."""
        return sum(int(self.pieces[self.bounds[i] : self.bounds[i + 1], 1].sum()) for i in indices)

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return `tokens` and `targets`, (len(indices), seq_len) int64 each.

        Raises:
            IndexError: an index is out of range.
        """
        shape = len(indices), self.seq_len
        tokens, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED_TARGET, np.int64)
        for row, index in enumerate(indices):
            if not 0 <= index < len(self):
                raise IndexError(f"row {index} of a dataset of {len(self)}")
            end = 0
            for first, length in self.pieces[self.bounds[index] : self.bounds[index + 1]].tolist():
                start, end = end, end + length
                tokens[row, start:end] = self.tokens[first : first + length]
                targets[row, start:end] = self.tokens[first + 1 : first + length + 1]
        return {"tokens": torch.from_numpy(tokens), "targets": torch.from_numpy(targets)}


def pack_documents(tokens: TokenArray, *, end: int, seq_len: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Assign the documents of a token stream to rows (best-fit packing; Ding et al., 2024, arXiv:2404.10830).

    A document longer than a row is divided into pieces of `seq_len` tokens and a shorter last one. Each piece of
    full length fills a row. `best_fit_decreasing` assigns the shorter pieces to rows. In a row, pieces at the beginning
    of a document come first.

    Args:
        tokens: (num_tokens,) unsigned integers.
        end: token that ends each document.
        seq_len: tokens per row.

    Returns:
        The arguments `pieces` and `bounds` of `PackedSequences`.
    """
    num_inputs = max(0, len(tokens) - 1)
    starts = np.concatenate([[0], _find(tokens[:num_inputs], end) + 1])
    starts = starts[starts < num_inputs]
    lengths = np.diff(starts, append=num_inputs)
    counts = -(-lengths // seq_len)
    offsets = seq_len * (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts))
    firsts = np.repeat(starts, counts) + offsets
    sizes = np.minimum(seq_len, np.repeat(lengths, counts) - offsets)
    is_full = sizes == seq_len
    rows = np.cumsum(is_full) - 1
    rows[~is_full] = is_full.sum() + best_fit_decreasing(sizes[~is_full], seq_len)
    order = np.lexsort((firsts, offsets > 0, rows))
    num_rows = int(rows.max(initial=-1)) + 1
    return np.stack([firsts, sizes], 1)[order], np.searchsorted(rows[order], np.arange(num_rows + 1))


def best_fit_decreasing(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Put each piece, the longest first, into the fullest row that has room for it (Johnson, 1973).

    Args:
        lengths: (pieces,) int64, in tokens, each at least 1 and at most `capacity`.
        capacity: row length in tokens.

    Returns:
        (pieces,) int64, the row of each piece.
    """
    assigned = np.empty(len(lengths), np.int64)
    rows_with_room, rooms, num_rows = defaultdict[int, list[int]](list), list[int](), 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        index = bisect_left(rooms, length)
        if index == len(rooms):
            row, room, num_rows = num_rows, capacity, num_rows + 1
        else:
            room = rooms[index]
            row = rows_with_room[room].pop()
            if not rows_with_room[room]:
                del rooms[index]
        assigned[piece] = row
        if (rest := room - length) > 0:
            if not rows_with_room[rest]:
                insort(rooms, rest)
            rows_with_room[rest].append(row)
    return assigned


def packed_sequences(
    arrays: Sequence[TokenArray], *, end: int, seq_len: int, cache_dir: str, fingerprint: str
) -> list[PackedSequences]:
    """Return the packed rows of several token arrays; rows are computed once and kept in the cache.

    Args:
        arrays: tokens of each array; no row has tokens of two arrays.
        end: token that ends each document.
        seq_len: tokens per row.
        cache_dir: parent folder of the cache.
        fingerprint: hash of the tokens.

    Raises:
        ConfigError: the cache cannot be written.
    """
    name = hashlib.sha256(f"packed {_FORMAT} {fingerprint} {end} {seq_len}".encode()).hexdigest()[:32]
    folder = cached_folder(cache_dir, name, partial(_write, arrays, end, seq_len), contents="rows of documents")
    return [
        PackedSequences(
            array,
            seq_len,
            np.load(folder / _PIECES.format(number), mmap_mode="r", allow_pickle=False),
            np.load(folder / _BOUNDS.format(number), mmap_mode="r", allow_pickle=False),
        )
        for number, array in enumerate(arrays)
    ]


def mean_tokens(parts: Sequence[TokenSequences]) -> int:
    """Return the mean tokens of a row without padding, rounded."""
    padding = sum(part.padding_tokens for part in parts if isinstance(part, PackedSequences))
    return round(parts[0].seq_len - padding / sum(map(len, parts)))


def describe_padding(parts: Sequence[TokenSequences]) -> dict[str, int]:
    """Return the entry of plan.json on the padding of packed rows; empty without packed rows."""
    padded = [part.padding_tokens for part in parts if isinstance(part, PackedSequences)]
    return {"padding_train_tokens": sum(padded)} if padded else {}


def describe_strategy(strategy: PackingStrategy) -> str:
    """Return the packing strategy as a suffix of a fingerprint, empty for the default."""
    return "" if strategy is PackingStrategy.wrapped else f"-{strategy.value}"


def _write(arrays: Sequence[TokenArray], end: int, seq_len: int, folder: Path) -> tuple[str, ...]:
    """Write the rows of each array, and return the names of the written files."""
    names = list[str]()
    for number, array in enumerate(arrays):
        for name, values in zip((_PIECES, _BOUNDS), pack_documents(array, end=end, seq_len=seq_len), strict=True):
            names.append(name.format(number))
            np.save(folder / names[-1], values)
    return tuple(names)


def _find(tokens: TokenArray, token: int) -> NDArray[np.int64]:
    """Return the indices of a token, (n,) int64; memory does not grow with the length of a memory-mapped array."""
    parts = range(0, len(tokens), _SCANNED_TOKENS)
    found = [start + np.flatnonzero(tokens[start : start + _SCANNED_TOKENS] == token) for start in parts]
    return np.concatenate([np.empty(0, np.int64), *found])
