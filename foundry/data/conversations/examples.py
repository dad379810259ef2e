"""Examples of their own lengths, of whose tokens some are to be learnt."""

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
"""A target that counts for nothing, as models have it."""

_FORMAT = 1
_RULES = 2
"""Version of the rules by which rows are refused; rows that were encoded under earlier ones are read again."""
_STATISTICS = "statistics.json"
_SPLITS = ("train", "validation")
_ROWS = "{}_rows.npy"
_SHOWN = 5
log = logging.getLogger(__name__)

Texts = Sequence[tuple[str, bool]]
"""The texts of an example, each with whether it is to be learnt."""

Encode = Callable[[Row], Sequence[Texts]]
"""The examples of a row, of each row as many; a `BadRowError` says why the row cannot be used."""


class BadRowError(ValueError):
    """A row cannot be used.

    Attributes:
        kind: a few words, under which such rows are counted.
    """

    def __init__(self, kind: str, message: str | None = None) -> None:
        super().__init__(kind if message is None else message)
        self.kind = kind


_Found = Sequence[Texts] | BadRowError
_EncodeBatch = Callable[[Sequence[Row]], list[_Found]]
Limited = Callable[[_EncodeBatch], AbstractContextManager[_EncodeBatch]]
"""Wraps a function that encodes a batch of rows."""

_Tokens = tuple[list[int], list[bool]]
"""The tokens of an example, and which of them are learnt."""


class Examples(MapsFiles, BatchDataset):
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

    def lengths_of(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """(len(indices),) int64, the tokens of these rows; nothing else is read."""
        rows = np.asarray(indices, dtype=np.int64)
        found: NDArray[np.int64] = self.offsets[rows + 1] - self.offsets[rows] - 1
        return found

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Rows padded on the right to the longest of them: tokens and targets, (len(indices), longest) int64 each."""
        found = self.packed([[index] for index in indices])
        return {name: found[name] for name in ("tokens", "targets")}

    def packed(self, packs: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Several samples a row, one after the other, padded on the right to the longest row.

        Returns:
            tokens, targets and documents, (len(packs), longest) int64 each, the last the number of each token's sample
            among all of them, -1 for padding.
        """
        shape = len(packs), max(1, *(int(self.lengths_of(pack).sum()) for pack in packs))
        tokens, targets, documents = (np.full(shape, fill, dtype=np.int64) for fill in (0, IGNORED_TARGET, -1))
        number = 0
        for row, pack in enumerate(packs):
            end = 0
            for index in pack:
                first, last = self.offsets[index : index + 2].tolist()
                here = slice(end, end := end + last - first - 1)
                tokens[row, here] = self.tokens[first : last - 1]
                following = self.tokens[first + 1 : last].astype(np.int64)
                targets[row, here] = np.where(self.trained[first + 1 : last], following, IGNORED_TARGET)
                documents[row, here] = number
                number += 1
        named = {"tokens": tokens, "targets": targets, "documents": documents}
        return {name: torch.from_numpy(array) for name, array in named.items()}


class Pairs(BatchDataset):
    """Sample i is two rows that answer the same prompt: the chosen one, 2i, and the rejected one, 2i + 1."""

    def __init__(self, examples: Examples) -> None:
        self.examples = examples

    def __len__(self) -> int:
        """Number of pairs."""
        return len(self.examples) // 2

    @property
    def longest(self) -> int:
        """The index of the pair with the longest row, which needs the most memory."""
        return self.examples.longest // 2

    def lengths_of(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """(len(indices), 2) int64, the tokens of the rows of these pairs."""
        return self.examples.lengths_of(_rows_of(indices)).reshape(-1, 2)

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Pairs padded on the right to the longest row: tokens and targets, (len(indices), 2, longest) int64 each."""
        rows = self.examples.batch(_rows_of(indices))
        return {name: value.view(-1, 2, value.shape[1]) for name, value in rows.items()}

    def packed(self, packs: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Several pairs in two rows, of which either may have chosen and rejected ones; see `place_parts`.

        Returns:
            tokens, targets and documents, (len(packs), 2, longest) int64 each; the documents of the n-th pair among all
            of them are 2n, the chosen one, and 2n + 1.
        """
        rows, numbers, first = list[list[int]](), [-1], 0
        for pack in packs:
            for row in place_parts(self.lengths_of(pack).tolist(), num_rows=2):
                rows.append([2 * pack[pair] + part for pair, part in row])
                numbers += [2 * (first + pair) + part for pair, part in row]
            first += len(pack)
        found = self.examples.packed(rows)
        # The rows' documents are numbered as they lie there.
        found["documents"] = torch.tensor(numbers)[found["documents"] + 1]
        return {name: value.view(len(packs), 2, -1) for name, value in found.items()}


def _rows_of(pairs: Sequence[int]) -> list[int]:
    return [row for pair in pairs for row in (2 * pair, 2 * pair + 1)]


class LastAnswers(Sequence[Prompt]):
    """The last answer of each row, and what comes before it.

    Args:
        examples: the rows.
        tokenizer: makes text of the answers.
        every: take only each so many-th row, from the first on.
    """

    def __init__(self, examples: Examples, tokenizer: Tokenizer, every: int = 1) -> None:
        self._examples, self._tokenizer, self._every = examples, tokenizer, every

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._examples) // self._every

    def __getitem__(self, index: Any) -> Any:
        """One prompt with its answer, or several."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        start, end = self._examples.offsets[self._every * index :][:2].tolist()
        tokens, trained = self._examples.tokens[start:end].tolist(), self._examples.trained[start:end]
        stop = int(np.flatnonzero(trained)[-1]) + 1
        before = np.flatnonzero(~trained[:stop])
        begin = int(before[-1]) + 1 if len(before) else 0
        said = np.flatnonzero(trained[:begin])
        turn = int(said[-1]) + 1 if len(said) else 0
        answer = decode_tokens(self._tokenizer, tokens[begin:stop])
        return Prompt(tuple(tokens[:begin]), answer, index, turn=turn)


@dataclass(frozen=True, kw_only=True)
class RowStatistics:
    """What became of the rows.

    Attributes:
        rows: that are used, of both splits.
        skipped: how many are not, by the reason.
        first: of these the first few: number of the file, number in it, what is wrong.
        sources: of the used rows of each source to learn from; none where there is one.
    """

    rows: int
    skipped: dict[str, int]
    first: list[tuple[int, int, str]]
    sources: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class EncodedRows:
    """A folder of the cache, its arrays memory-mapped.

    Attributes:
        rows: of which row of its split each example is, (examples,) int64 of train and validation, where that is kept.
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
    described: str,
    tokenizer: Tokenizer,
    max_tokens: int,
    cache_dir: str,
    keeps_rows: bool = False,
    num_rows: Callable[[], int] | None = None,
    limited: Limited = nullcontext,
) -> EncodedRows:
    """Rows as examples, from the cache or into it; rows that cannot be used are left out and counted.

    Args:
        read: opens the rows; where their tokens are in the cache, nobody has to.
        encode: the texts of a row.
        described: all that rows and texts depend on, besides the tokenizer.
        tokenizer: encodes each text by itself.
        max_tokens: of a row that can be used.
        cache_dir: the cache's parent folder.
        keeps_rows: keep which of its split's rows each example is of.
        num_rows: counts the rows of both splits; None: nobody has.
        limited: wraps the function that calls `encode` for a batch of rows, as `ChatTemplate.limited` does.

    Raises:
        ConfigError: a file cannot be read, or the cache cannot be written.
    """
    kept = " of rows" if keeps_rows else ""
    settings = f"examples{kept} {_FORMAT} {max_tokens} {described} {tokenizer.to_str()}"
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
    """Write the arrays of both splits and the statistics; the names of the files."""
    skipped, first, rows, sources = Counter[str](), list[tuple[int, int, str]](), 0, list[int]()
    files = [*_names("train"), *_names("validation"), _STATISTICS]
    progress = ReadingProgress("tokenising", None if num_rows is None else num_rows(), in_rows=True)
    for split, of_split in zip(_SPLITS, read(), strict=True):
        parts, of_source = parts_of(of_split), Counter[int]()
        names, used = [folder / name for name in _names(split)], list[int]()
        with (
            ArrayWriter(names[0], token_dtype(encoder.tokenizer)) as tokens,
            ArrayWriter(names[1], np.dtype(np.bool_)) as trained,
            ArrayWriter(names[2], np.dtype(np.int64)) as offsets,
        ):
            offsets.append([0])
            encoded = (
                (source, *one) for source, part in enumerate(parts) for one in encoder.encoded(progress.over(part))
            )
            for number, (source, row, found) in enumerate(encoded):
                if isinstance(found, BadRowError):
                    skipped[found.kind] += 1
                    if len(first) < _SHOWN:
                        first.append((row.file, row.number, str(found)))
                    continue
                for ids, are_trained in found:
                    tokens.append(ids)
                    trained.append(are_trained)
                    offsets.append([tokens.length])
                    used += [number] if keeps_rows else []
                rows += 1
                of_source[source] += 1
        if split == "train" and len(parts) > 1:
            sources = [of_source[source] for source in range(len(parts))]
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
        """Each row with the tokens of its examples, or why it cannot be used."""
        with self.limited(self._texts_of_batch) as texts_of_batch:
            for batch in batches(rows):
                yield from self._encoded_batch(batch, texts_of_batch(batch))

    def _texts_of_batch(self, batch: Sequence[Row]) -> list[_Found]:
        return [self._texts(row) for row in batch]

    def _encoded_batch(
        self, batch: Sequence[Row], texts: Sequence[_Found]
    ) -> Iterator[tuple[Row, list[_Tokens] | BadRowError]]:
        used = [found for found in texts if not isinstance(found, BadRowError)]
        flat = [text for found in used for example in found for text, _ in example]
        ids = iter(encode_texts(self.tokenizer, flat))
        for row, found in zip(batch, texts, strict=True):
            if isinstance(found, BadRowError):
                yield row, found
                continue
            encoded = [[(next(ids), is_trained) for _, is_trained in example] for example in found]
            yield row, self._joined(encoded)

    def _texts(self, row: Row) -> _Found:
        try:
            if row.wrong is not None:
                raise BadRowError("cannot be read", row.wrong)
            return self.encode(row)
        except BadRowError as error:
            return error

    def _joined(self, examples: Sequence[Sequence[tuple[list[int], bool]]]) -> list[_Tokens] | BadRowError:
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
            raise BadRowError("no token to learn", "has no token to learn")
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


def describe_pairs(train: Pairs, validation: Pairs) -> dict[str, Any]:
    """What plan.json says of pairs besides: their number, and the mean tokens to learn of both kinds of rows."""
    learnt = [
        np.add.reduceat(part.examples.trained, part.examples.offsets[:-1], dtype=np.int64)
        for part in (train, validation)
    ]
    chosen, rejected = (float(np.concatenate([part[kind::2] for part in learnt]).mean()) for kind in (0, 1))
    return {
        "train_rows": len(train),
        "validation_rows": len(validation),
        "chosen_tokens": chosen,
        "rejected_tokens": rejected,
    }


def list_skipped(statistics: RowStatistics, places: Sequence[str]) -> tuple[str, list[str]]:
    """How many rows cannot be used, and the first of them with their places."""
    total = sum(statistics.skipped.values())
    counted = ", ".join(f"{count} {kind}" for kind, count in sorted(statistics.skipped.items()))
    first = [f"{places[file]}:{number} {what}" for file, number, what in statistics.first]
    return f"{total} of {total + statistics.rows} rows cannot be used ({counted})", first
