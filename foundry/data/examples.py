"""Examples of their own lengths, of whose tokens some are to be learnt."""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from foundry.data.rows import Row, RowSplits
from foundry.data.splits import Prompt
from foundry.data.token_cache import ArrayWriter, batches, cached_folder, token_dtype
from foundry.data.token_sequences import TokenArray
from foundry.run_dir.files import read_text

IGNORED_TARGET = -100
"""A target that counts for nothing, as models have it."""

_FORMAT = 1
_STATISTICS = "statistics.json"
_SPLITS = ("train", "validation")
_SHOWN = 5
log = logging.getLogger(__name__)

Encode = Callable[[Row], "Sequence[tuple[str, bool]]"]
"""The texts of a row, each with whether it is to be learnt; a ValueError says why the row cannot be used."""


class Examples:
    """Sample i is one row of tokens; its targets are the same one token later, where these are to be learnt.

    Args:
        tokens: (num_tokens,) unsigned integers of all rows.
        trained: (num_tokens,) bool, which of them are to be learnt.
        offsets: (rows + 1,) int64, where each row starts.
    """

    def __init__(self, tokens: TokenArray, trained: NDArray[np.bool_], offsets: NDArray[np.int64]) -> None:
        self.tokens, self.trained, self.offsets = tokens, trained, offsets

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(rows,) int64, the tokens of each row that the model is given: all but the last."""
        return np.diff(self.offsets) - 1

    @property
    def longest(self) -> int:
        """The index of the longest row, which needs the most memory."""
        return int(self.lengths.argmax())

    def num_tokens(self, indices: Sequence[int]) -> int:
        """Tokens of these rows together, without padding."""
        return int(self.lengths[np.asarray(indices, dtype=np.int64)].sum())

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One row: tokens and targets, (length,) int64 each."""
        return {name: value[0] for name, value in self.batch([index]).items()}

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Rows padded on the right to the longest of them: tokens and targets, (len(indices), longest) int64 each."""
        starts, ends = self.offsets[np.asarray(indices)], self.offsets[np.asarray(indices) + 1]
        longest = int((ends - starts).max()) - 1
        tokens = np.zeros((len(indices), longest), dtype=np.int64)
        targets = np.full((len(indices), longest), IGNORED_TARGET, dtype=np.int64)
        for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            tokens[row, : end - start - 1] = self.tokens[start : end - 1]
            following = self.tokens[start + 1 : end].astype(np.int64)
            targets[row, : end - start - 1] = np.where(self.trained[start + 1 : end], following, IGNORED_TARGET)
        return {"tokens": torch.from_numpy(tokens), "targets": torch.from_numpy(targets)}


class LastAnswers(Sequence[Prompt]):
    """The last answer of each row, and what comes before it.

    Args:
        examples: the rows.
        tokenizer: makes text of the answers.
    """

    def __init__(self, examples: Examples, tokenizer: Tokenizer) -> None:
        self._examples, self._tokenizer = examples, tokenizer

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._examples)

    def __getitem__(self, index: Any) -> Any:
        """One prompt with its answer, or several."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        start, end = self._examples.offsets[index : index + 2].tolist()
        tokens, trained = self._examples.tokens[start:end].tolist(), self._examples.trained[start:end]
        stop = int(np.flatnonzero(trained)[-1]) + 1
        before = np.flatnonzero(~trained[:stop])
        begin = int(before[-1]) + 1 if len(before) else 0
        answer: str = self._tokenizer.decode(tokens[begin:stop], skip_special_tokens=True)
        return Prompt(tuple(tokens[:begin]), answer, index)


@dataclass(frozen=True, kw_only=True)
class RowStatistics:
    """What became of the rows.

    Attributes:
        rows: that are used, of both splits.
        skipped: how many are not, by the reason.
        first: of these the first few: number of the file, number in it, what is wrong.
    """

    rows: int
    skipped: dict[str, int]
    first: list[tuple[int, int, str]]


@dataclass(frozen=True)
class EncodedRows:
    """A folder of the cache, its arrays memory-mapped."""

    fingerprint: str
    train: Examples
    validation: Examples
    statistics: RowStatistics


class BadRowError(ValueError):
    """A row cannot be used.

    Attributes:
        kind: a few words, under which such rows are counted.
    """

    def __init__(self, kind: str, message: str | None = None) -> None:
        super().__init__(kind if message is None else message)
        self.kind = kind


def encode_rows(
    read: Callable[[], RowSplits],
    encode: Encode,
    *,
    described: str,
    tokenizer: Tokenizer,
    max_tokens: int,
    cache_dir: str,
) -> EncodedRows:
    """Rows as examples, from the cache or into it; rows that cannot be used are left out and counted.

    Args:
        read: opens the rows; where their tokens are in the cache, nobody has to.
        encode: the texts of a row.
        described: all that rows and texts depend on, besides the tokenizer.
        tokenizer: encodes each text by itself.
        max_tokens: of a row that can be used.
        cache_dir: the cache's parent folder.

    Raises:
        ConfigError: a file cannot be read, or the cache cannot be written.
    """
    settings = f"examples {_FORMAT} {max_tokens} {described} {tokenizer.to_str()}"
    fingerprint = hashlib.sha256(settings.encode(errors="surrogateescape")).hexdigest()[:32]
    folder = cached_folder(cache_dir, fingerprint, partial(_fill, read, encode, tokenizer, max_tokens))
    train, validation = (_open(folder, split) for split in _SPLITS)
    return EncodedRows(fingerprint, train, validation, RowStatistics(**json.loads(read_text(folder / _STATISTICS))))


def _names(split: str) -> tuple[str, str, str]:
    return f"{split}_tokens.npy", f"{split}_trained.npy", f"{split}_offsets.npy"


def _open(folder: Path, split: str) -> Examples:
    return Examples(*(np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in _names(split)))


def _fill(
    read: Callable[[], RowSplits], encode: Encode, tokenizer: Tokenizer, max_tokens: int, folder: Path
) -> tuple[str, ...]:
    """Write the arrays of both splits and the statistics; the names of the files."""
    skipped, first, rows = Counter[str](), list[tuple[int, int, str]](), 0
    encoder = _Encoder(encode, tokenizer, max_tokens)
    for split, of_split in zip(_SPLITS, read(), strict=True):
        names = [folder / name for name in _names(split)]
        with (
            ArrayWriter(names[0], token_dtype(tokenizer)) as tokens,
            ArrayWriter(names[1], np.dtype(np.bool_)) as trained,
            ArrayWriter(names[2], np.dtype(np.int64)) as offsets,
        ):
            offsets.append([0])
            for row, found in encoder.encoded(of_split):
                if isinstance(found, BadRowError):
                    skipped[found.kind] += 1
                    if len(first) < _SHOWN:
                        first.append((row.file, row.number, str(found)))
                    continue
                tokens.append(found[0])
                trained.append(found[1])
                offsets.append([tokens.length])
                rows += 1
    statistics = {"rows": rows, "skipped": dict(skipped), "first": first}
    (folder / _STATISTICS).write_text(json.dumps(statistics))
    return *_names("train"), *_names("validation"), _STATISTICS


@dataclass(frozen=True)
class _Encoder:
    encode: Encode
    tokenizer: Tokenizer
    max_tokens: int

    def encoded(self, rows: Iterable[Row]) -> Iterator[tuple[Row, "tuple[list[int], list[bool]] | BadRowError"]]:
        """Each row with its tokens and which of them are learnt, or why it cannot be used."""
        for batch in batches(rows):
            texts = [self._texts(row) for row in batch]
            flat = [text for found in texts if not isinstance(found, BadRowError) for text, _ in found]
            ids = iter(self.tokenizer.encode_batch(flat, add_special_tokens=False))
            for row, found in zip(batch, texts, strict=True):
                if isinstance(found, BadRowError):
                    yield row, found
                else:
                    yield row, self._joined([(next(ids).ids, is_trained) for _, is_trained in found])

    def _texts(self, row: Row) -> "Sequence[tuple[str, bool]] | BadRowError":
        try:
            if row.wrong is not None:
                raise BadRowError("cannot be read", row.wrong)
            return self.encode(row)
        except BadRowError as error:
            return error

    def _joined(self, parts: Sequence[tuple[list[int], bool]]) -> "tuple[list[int], list[bool]] | BadRowError":
        tokens = [token for ids, _ in parts for token in ids]
        trained = [is_trained for ids, is_trained in parts for _ in ids]
        if len(tokens) > self.max_tokens:
            message = f"has {len(tokens)} tokens, more than data.seq_len={self.max_tokens}"
            return BadRowError("longer than seq_len", message)
        if not any(trained[1:]):
            return BadRowError("no token to learn", "has no token to learn")
        return tokens, trained


def describe_lengths(train: Examples, validation: Examples, statistics: RowStatistics) -> dict[str, Any]:
    """What plan.json says of examples: rows, their lengths in tokens, and the share of these that is learnt."""
    lengths = np.concatenate([train.lengths, validation.lengths]) + 1
    shares = np.percentile(lengths, [50, 90, 99], method="inverted_cdf").astype(int).tolist()
    return {
        "rows": statistics.rows,
        "skipped_rows": statistics.skipped,
        "train_rows": len(train),
        "validation_rows": len(validation),
        "train_tokens": len(train.tokens),
        "validation_tokens": len(validation.tokens),
        "row_tokens": dict(zip(("p50", "p90", "p99", "max"), [*shares, int(lengths.max())], strict=True)),
        "trained_share": float(np.concatenate([train.trained, validation.trained]).mean()),
    }


def list_skipped(statistics: RowStatistics, places: Sequence[str]) -> tuple[str, list[str]]:
    """How many rows cannot be used, and the first of them with their places."""
    total = sum(statistics.skipped.values())
    counted = ", ".join(f"{count} {kind}" for kind, count in sorted(statistics.skipped.items()))
    first = [f"{places[file]}:{number} {what}" for file, number, what in statistics.first]
    return f"{total} of {total + statistics.rows} rows cannot be used ({counted})", first
