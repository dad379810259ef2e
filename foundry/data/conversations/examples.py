"""Datasets of variable-length token sequences with a loss mask, and their construction from rows."""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from foundry.data.corpora.token_cache import ArrayWriter, batches, token_dtype
from foundry.data.corpora.token_sequences import TokenArray
from foundry.data.corpora.tokenizer import decode_tokens, encode_texts
from foundry.data.dataset import BatchDataset
from foundry.data.io.cached_folder import cached_folder
from foundry.data.io.mapped_files import MapsFiles
from foundry.data.io.reading_progress import ReadingProgress
from foundry.data.io.rows import Row, RowSplits
from foundry.data.mixture import parts_of
from foundry.data.packing import place_parts
from foundry.data.splits import Prompt
from foundry.run_dir.files import read_text

IGNORED_TARGET = -100
"""Target that is ignored by the loss, the convention of PyTorch and transformers."""

_FORMAT = 1
_RULES = 2
"""Version of the rules that reject rows; a change of version makes the cache read all rows again."""
_STATISTICS = "statistics.json"
_SPLITS = ("train", "validation")
_ROWS = "{}_rows.npy"
_MAX_SHOWN = 5
log = logging.getLogger(__name__)

Texts = Sequence[tuple[str, bool]]
"""Texts of an example, each with a flag that is true if it counts in the loss."""

Encode = Callable[[Row], Sequence[Texts]]
"""Function that returns the examples of a row, equally many for each row, or raises `BadRowError`."""


class BadRowError(ValueError):
    """Raised if a row cannot be used.

    Attributes:
        kind: category of the error, for counting skipped rows.
    """

    def __init__(self, kind: str, message: str | None = None) -> None:
        super().__init__(kind if message is None else message)
        self.kind = kind


_RowTexts = Sequence[Texts] | BadRowError
_EncodeBatch = Callable[[Sequence[Row]], list[_RowTexts]]
Limited = Callable[[_EncodeBatch], AbstractContextManager[_EncodeBatch]]
"""Context manager that wraps a function that encodes a batch of rows."""

_Tokens = tuple[list[int], list[bool]]
"""Token ids of an example, and its loss mask."""


class Examples(MapsFiles, BatchDataset):
    """Dataset of rows of tokens; targets are the tokens shifted by one, `IGNORED_TARGET` outside the loss mask.

    Args:
        tokens: (num_tokens,) unsigned integers, the rows one after another.
        trained: (num_tokens,) bool, the loss mask.
        offsets: (rows + 1,) int64, start of each row in `tokens`.
    """

    def __init__(self, tokens: TokenArray, trained: NDArray[np.bool_], offsets: NDArray[np.int64]) -> None:
        self.tokens, self.trained, self.offsets = tokens, trained, offsets

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of input tokens of each row, (rows,) int64: all but the last token, which is only a target."""
        return np.diff(self.offsets) - 1

    @property
    def longest(self) -> int:
        """Index of the longest row, which needs the most memory."""
        return int(self.lengths.argmax())

    def lengths_of(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """Return the number of input tokens of these rows, (len(indices),) int64; reads only `offsets`."""
        rows = np.asarray(indices, dtype=np.int64)
        lengths: NDArray[np.int64] = self.offsets[rows + 1] - self.offsets[rows] - 1
        return lengths

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return `tokens` and `targets`, (len(indices), longest) int64 each, padded on the right."""
        batch = self.packed([[index] for index in indices])
        return {name: batch[name] for name in ("tokens", "targets")}

    def packed(self, packs: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Return packed rows: the samples of each pack one after another, padded on the right to the longest row.

        Returns:
            `tokens`, `targets` and `documents`, (len(packs), longest) int64 each. `documents` numbers the samples of
            all packs consecutively, and is -1 for padding.
        """
        shape = len(packs), max(1, *(int(self.lengths_of(pack).sum()) for pack in packs))
        tokens, targets, documents = (np.full(shape, fill, dtype=np.int64) for fill in (0, IGNORED_TARGET, -1))
        number = 0
        for row, pack in enumerate(packs):
            end = 0
            for index in pack:
                first, last = self.offsets[index : index + 2].tolist()
                span = slice(end, end := end + last - first - 1)
                tokens[row, span] = self.tokens[first : last - 1]
                next_tokens = self.tokens[first + 1 : last].astype(np.int64)
                targets[row, span] = np.where(self.trained[first + 1 : last], next_tokens, IGNORED_TARGET)
                documents[row, span] = number
                number += 1
        arrays = {"tokens": tokens, "targets": targets, "documents": documents}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


class Pairs(BatchDataset):
    """Dataset of preference pairs; pair i has the chosen row 2i and the rejected row 2i + 1 of `examples`."""

    def __init__(self, examples: Examples) -> None:
        self.examples = examples

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.examples) // 2

    @property
    def longest(self) -> int:
        """Index of the pair with the longest row, which needs the most memory."""
        return self.examples.longest // 2

    def lengths_of(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """Return the number of input tokens of both rows of these pairs, (len(indices), 2) int64."""
        return self.examples.lengths_of(_rows_of(indices)).reshape(-1, 2)

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return `tokens` and `targets`, (len(indices), 2, longest) int64 each, padded on the right."""
        rows = self.examples.batch(_rows_of(indices))
        return {name: value.view(-1, 2, value.shape[1]) for name, value in rows.items()}

    def packed(self, packs: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Return packed pairs, two rows per pack; a row can mix chosen and rejected answers (see `place_parts`).

        Returns:
            `tokens`, `targets` and `documents`, (len(packs), 2, longest) int64 each. The n-th pair of all packs has the
            document ids 2n (chosen) and 2n + 1 (rejected).
        """
        rows, numbers, first = list[list[int]](), [-1], 0
        for pack in packs:
            for row in place_parts(self.lengths_of(pack).tolist(), num_rows=2):
                rows.append([2 * pack[pair] + part for pair, part in row])
                numbers += [2 * (first + pair) + part for pair, part in row]
            first += len(pack)
        batch = self.examples.packed(rows)
        # `Examples.packed` numbers the documents by place; map these numbers to the document ids of the pairs.
        batch["documents"] = torch.tensor(numbers)[batch["documents"] + 1]
        return {name: value.view(len(packs), 2, -1) for name, value in batch.items()}


def _rows_of(pairs: Sequence[int]) -> list[int]:
    return [row for pair in pairs for row in (2 * pair, 2 * pair + 1)]


class LastAnswers(Sequence[Prompt]):
    """Prompts made from rows: the last answer of each row is the reference, the tokens before it are the prompt.

    Args:
        examples: the rows.
        tokenizer: decodes the answers.
        every: use every n-th row only, starting with the first.
    """

    def __init__(self, examples: Examples, tokenizer: Tokenizer, every: int = 1) -> None:
        self._examples, self._tokenizer, self._every = examples, tokenizer, every

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self._examples) // self._every

    def __getitem__(self, index: Any) -> Any:
        """Return one prompt for an integer, or a list of prompts for a slice."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        start, end = self._examples.offsets[self._every * index :][:2].tolist()
        tokens, trained = self._examples.tokens[start:end].tolist(), self._examples.trained[start:end]
        stop = int(np.flatnonzero(trained)[-1]) + 1
        prompt_indices = np.flatnonzero(~trained[:stop])
        begin = int(prompt_indices[-1]) + 1 if len(prompt_indices) else 0
        answer_indices = np.flatnonzero(trained[:begin])
        turn = int(answer_indices[-1]) + 1 if len(answer_indices) else 0
        answer = decode_tokens(self._tokenizer, tokens[begin:stop])
        return Prompt(tuple(tokens[:begin]), answer, index, turn=turn)


@dataclass(frozen=True, kw_only=True)
class RowStatistics:
    """Counts of used and skipped rows.

    Attributes:
        rows: number of used rows in both splits.
        skipped: number of skipped rows by reason.
        first: the first few skipped rows: file index, row number in the file, and error message.
        sources: number of used training rows of each source; empty if there is only one source.
    """

    rows: int
    skipped: dict[str, int]
    first: list[tuple[int, int, str]]
    sources: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class EncodedRows:
    """Tokenized rows in a folder of the cache, with memory-mapped arrays.

    Attributes:
        fingerprint: hash of the rows and of the settings on which their tokens depend.
        train: training examples.
        validation: validation examples.
        statistics: counts of used and skipped rows.
        rows: row index of each example in its split, (examples,) int64 for training and validation; empty if not kept.
    """

    fingerprint: str
    train: Examples
    validation: Examples
    statistics: RowStatistics
    rows: tuple[NDArray[np.int64], ...] = ()


def encode_rows(
    read: Callable[[], RowSplits],
    encode: Encode,
    *,
    description: str,
    tokenizer: Tokenizer,
    max_tokens: int,
    cache_dir: str,
    keeps_rows: bool = False,
    num_rows: Callable[[], int] | None = None,
    limited: Limited = nullcontext,
) -> EncodedRows:
    """Tokenize rows into the cache, or open the cached result. Rows that cannot be used are skipped and counted.

    Args:
        read: opens the rows; called only if the tokens are not cached.
        encode: returns the texts of a row.
        description: text that identifies everything on which the rows and their texts depend.
        tokenizer: encodes each text separately.
        max_tokens: maximum tokens of a row; longer rows are skipped.
        cache_dir: parent folder of the cache.
        keeps_rows: record the row index of each example.
        num_rows: counts the rows of both splits, for the progress display; None if the total is unknown.
        limited: wraps the function that calls `encode` for a batch of rows, such as `ChatTemplate.limited`.

    Raises:
        ConfigError: a file cannot be read, or the cache cannot be written.
    """
    suffix = " of rows" if keeps_rows else ""
    settings = f"examples{suffix} {_FORMAT} {max_tokens} {description} {tokenizer.to_str()}"
    fingerprint = hashlib.sha256(settings.encode(errors="surrogateescape")).hexdigest()[:32]
    encoder = _Encoder(encode, tokenizer, max_tokens, limited)
    name = hashlib.sha256(f"{fingerprint} rules {_RULES}".encode()).hexdigest()[:32]
    folder = cached_folder(cache_dir, name, partial(_fill, read, encoder, keeps_rows, num_rows))
    train, validation = (_open(folder, split) for split in _SPLITS)
    statistics = RowStatistics(**json.loads(read_text(folder / _STATISTICS)))
    rows = tuple(np.load(folder / _ROWS.format(split), allow_pickle=False) for split in _SPLITS if keeps_rows)
    return EncodedRows(fingerprint, train, validation, statistics, rows)


def _names(split: str) -> tuple[str, str, str]:
    return f"{split}_tokens.npy", f"{split}_trained.npy", f"{split}_offsets.npy"


def _open(folder: Path, split: str) -> Examples:
    return Examples(*(np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in _names(split)))


def _fill(
    read: Callable[[], RowSplits],
    encoder: "_Encoder",
    keeps_rows: bool,
    num_rows: Callable[[], int] | None,
    folder: Path,
) -> tuple[str, ...]:
    """Write the arrays of both splits and the statistics, and return the names of the written files."""
    skipped, first, rows, sources = Counter[str](), list[tuple[int, int, str]](), 0, list[int]()
    files = [*_names("train"), *_names("validation"), _STATISTICS]
    progress = ReadingProgress("tokenizing", None if num_rows is None else num_rows(), in_rows=True)
    for split, split_rows in zip(_SPLITS, read(), strict=True):
        parts, source_counts = parts_of(split_rows), Counter[int]()
        names, used = [folder / name for name in _names(split)], list[int]()
        with (
            ArrayWriter(names[0], token_dtype(encoder.tokenizer)) as tokens,
            ArrayWriter(names[1], np.dtype(np.bool_)) as trained,
            ArrayWriter(names[2], np.dtype(np.int64)) as offsets,
        ):
            offsets.append([0])
            encoded = (
                (source, *item) for source, part in enumerate(parts) for item in encoder.encoded(progress.over(part))
            )
            for number, (source, row, examples) in enumerate(encoded):
                if isinstance(examples, BadRowError):
                    skipped[examples.kind] += 1
                    if len(first) < _MAX_SHOWN:
                        first.append((row.file, row.number, str(examples)))
                    continue
                for ids, are_trained in examples:
                    tokens.append(ids)
                    trained.append(are_trained)
                    offsets.append([tokens.length])
                    used += [number] if keeps_rows else []
                rows += 1
                source_counts[source] += 1
        if split == "train" and len(parts) > 1:
            sources = [source_counts[source] for source in range(len(parts))]
        if keeps_rows:
            np.save(folder / _ROWS.format(split), np.array(used, dtype=np.int64))
            files.append(_ROWS.format(split))
    statistics = {"rows": rows, "skipped": dict(skipped), "first": first, "sources": sources}
    (folder / _STATISTICS).write_text(json.dumps(statistics))
    return tuple(files)


@dataclass(frozen=True)
class _Encoder:
    encode: Encode
    tokenizer: Tokenizer
    max_tokens: int
    limited: Limited

    def encoded(self, rows: Iterable[Row]) -> Iterator[tuple[Row, list[_Tokens] | BadRowError]]:
        """Yield each row with the tokens and loss masks of its examples, or with the error if it cannot be used."""
        with self.limited(self._texts_of_batch) as texts_of_batch:
            for batch in batches(rows):
                yield from self._encode_batch(batch, texts_of_batch(batch))

    def _texts_of_batch(self, batch: Sequence[Row]) -> list[_RowTexts]:
        return [self._texts(row) for row in batch]

    def _encode_batch(
        self, batch: Sequence[Row], texts: Sequence[_RowTexts]
    ) -> Iterator[tuple[Row, list[_Tokens] | BadRowError]]:
        usable = [examples for examples in texts if not isinstance(examples, BadRowError)]
        flat = [text for examples in usable for example in examples for text, _ in example]
        ids = iter(encode_texts(self.tokenizer, flat))
        for row, examples in zip(batch, texts, strict=True):
            if isinstance(examples, BadRowError):
                yield row, examples
                continue
            encoded = [[(next(ids), is_trained) for _, is_trained in example] for example in examples]
            yield row, self._join_parts(encoded)

    def _texts(self, row: Row) -> _RowTexts:
        try:
            if row.error is not None:
                raise BadRowError("cannot be read", row.error)
            return self.encode(row)
        except BadRowError as error:
            return error

    def _join_parts(self, examples: Sequence[Sequence[tuple[list[int], bool]]]) -> list[_Tokens] | BadRowError:
        try:
            return [self._tokens(parts) for parts in examples]
        except BadRowError as error:
            return error

    def _tokens(self, parts: Sequence[tuple[list[int], bool]]) -> _Tokens:
        tokens = [token for ids, _ in parts for token in ids]
        trained = [is_trained for ids, is_trained in parts for _ in ids]
        if len(tokens) > self.max_tokens:
            message = f"has {len(tokens)} tokens, more than data.seq_len={self.max_tokens}"
            raise BadRowError("longer than seq_len", message)
        if not any(trained[1:]):
            raise BadRowError("no token to learn", "has no token to train on")
        return tokens, trained


def describe_lengths(train: Examples, validation: Examples, statistics: RowStatistics) -> dict[str, Any]:
    """Return statistics of rows for plan.json: counts, percentiles of row lengths, and share of tokens in the loss."""
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


def describe_pairs(train: Pairs, validation: Pairs) -> dict[str, Any]:
    """Return statistics of pairs for plan.json: counts, and mean loss tokens of the chosen and the rejected rows."""
    token_counts = [
        np.add.reduceat(part.examples.trained, part.examples.offsets[:-1], dtype=np.int64)
        for part in (train, validation)
    ]
    chosen, rejected = (float(np.concatenate([part[kind::2] for part in token_counts]).mean()) for kind in (0, 1))
    return {
        "train_rows": len(train),
        "validation_rows": len(validation),
        "chosen_tokens": chosen,
        "rejected_tokens": rejected,
    }


def list_skipped(statistics: RowStatistics, places: Sequence[str]) -> tuple[str, list[str]]:
    """Return a summary of the skipped rows, and a line with file, row number and error for the first five of them."""
    total = sum(statistics.skipped.values())
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(statistics.skipped.items()))
    first = [f"{places[file]}:{number} {message}" for file, number, message in statistics.first]
    return f"{total} of {total + statistics.rows} rows cannot be used ({counts})", first
