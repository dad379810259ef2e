"""Tokenised corpora on disk: built once, shared by every rank and run."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from foundry.config.schemas.data import Tokenised
from foundry.data.corpora.corpus import Corpus
from foundry.data.corpora.token_sequences import TokenArray
from foundry.data.corpora.tokenizer import (
    END_OF_DOCUMENT,
    count_ids,
    encode_texts,
    load_tokenizer,
    train_tokenizer,
    usual_end,
)
from foundry.data.io.cached_folder import cached_folder
from foundry.data.io.reading_progress import ReadingProgress, utf8_bytes
from foundry.data.mixture import parts_of
from foundry.run_dir.files import read_text
from foundry.run_dir.names import TOKENIZER

_FORMAT = 1
_TRAIN, _TRAIN_OF_SOURCE = "train.npy", "train_{}.npy"
_VALIDATION = "validation.npy"
_STATISTICS = "statistics.json"
_DOCUMENTS_PER_BATCH, _CHARACTERS_PER_BATCH = 256, 2**20
_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True)
class TokenStatistics:
    """Facts of a tokenised corpus.

    Attributes:
        documents: of both splits.
        train_tokens, validation_tokens: ends of documents included.
        unigram_entropy: nats per held-out token under the unigram distribution of the training tokens, with one
            added to every count: what a model reaches that knows frequencies and nothing else.
    """

    documents: int
    train_tokens: int
    validation_tokens: int
    unigram_entropy: float


@dataclass(frozen=True)
class TokenisedCorpus:
    """A published cache folder, its arrays memory-mapped; the token `end` ends each document.

    Attributes:
        train: the tokens of each source, most often of one.
    """

    fingerprint: str
    tokenizer: Tokenizer
    end: int
    train: tuple[TokenArray, ...]
    validation: TokenArray
    statistics: TokenStatistics


def tokenised(corpus: Corpus, settings: Tokenised) -> TokenisedCorpus:
    """The corpus as tokens, from the cache or into it.

    Raises:
        ConfigError: the tokenizer cannot be read or is larger than vocab_size, a document cannot be read, or the cache
            cannot be written.
    """
    vocab_size = settings.vocab_size
    chosen = None if settings.tokenizer is None else load_tokenizer(settings.tokenizer, vocab_size)
    described = "" if chosen is None else chosen[0].to_str()
    if chosen is not None and chosen[1] != usual_end(chosen[0]):
        described += f" {chosen[1]}"
    # The order of a run is drawn from it, so it stays what it was for runs that are resumed.
    described = f"{_FORMAT} {vocab_size} {described} {corpus.fingerprint}"
    fingerprint = hashlib.sha256(described.encode()).hexdigest()[:32]
    folder = cached_folder(settings.cache_dir, fingerprint, partial(_build, corpus, vocab_size, chosen))
    found = Tokenizer.from_file(str(folder / TOKENIZER))
    return TokenisedCorpus(
        fingerprint,
        found,
        trained_end(found) if chosen is None else chosen[1],
        tuple(np.load(file, mmap_mode="r", allow_pickle=False) for file in _train_files(folder)),
        np.load(folder / _VALIDATION, mmap_mode="r", allow_pickle=False),
        TokenStatistics(**json.loads(read_text(folder / _STATISTICS))),
    )


def _train_files(folder: Path) -> list[Path]:
    """The tokens of each source."""
    found = sorted(folder.glob(_TRAIN_OF_SOURCE.format("*")), key=lambda file: int(file.stem.rpartition("_")[2]))
    return found or [folder / _TRAIN]


def _build(corpus: Corpus, vocab_size: int, chosen: tuple[Tokenizer, int] | None, folder: Path) -> tuple[str, ...]:
    """Write tokenizer, tokens and statistics; the names of the files."""
    train_texts, validation_texts, num_bytes = corpus.read()
    if chosen is None:
        learning = ReadingProgress("learning a tokenizer")
        chosen = train_with_end(learning.over(train_texts, utf8_bytes), vocab_size)
    tokenizer, end = chosen
    tokenizer.save(str(folder / TOKENIZER))
    sources = parts_of(train_texts)
    names = [_TRAIN] if len(sources) == 1 else [_TRAIN_OF_SOURCE.format(number) for number in range(len(sources))]
    progress = ReadingProgress("tokenising", num_bytes)
    encode = partial(_encode, progress, tokenizer, end)
    encoded = [encode(texts, folder / name) for texts, name in zip(sources, names, strict=True)]
    train = _Encoded(sum(each.documents for each in encoded), np.sum([each.counts for each in encoded], axis=0))
    validation = encode(validation_texts, folder / _VALIDATION)
    statistics = TokenStatistics(
        documents=train.documents + validation.documents,
        train_tokens=int(train.counts.sum()),
        validation_tokens=int(validation.counts.sum()),
        unigram_entropy=unigram_entropy(train.counts, validation.counts),
    )
    (folder / _STATISTICS).write_text(json.dumps(asdict(statistics)))
    return TOKENIZER, *names, _VALIDATION, _STATISTICS


def train_with_end(texts: Iterable[str], vocab_size: int) -> tuple[Tokenizer, int]:
    """A BPE of the texts, of at most that many entries, and the token that ends a document."""
    tokenizer = train_tokenizer(texts, vocab_size)
    return tokenizer, trained_end(tokenizer)


def trained_end(tokenizer: Tokenizer) -> int:
    """The token that ends a document, of a tokenizer that was trained here."""
    end: int | None = tokenizer.token_to_id(END_OF_DOCUMENT)
    assert end is not None
    return end


class _Encoded(NamedTuple):
    """What a file of tokens holds: its documents, and how often each token comes, (vocab_size,) int64."""

    documents: int
    counts: NDArray[np.int64]


def _encode(progress: ReadingProgress, tokenizer: Tokenizer, end: int, texts: Iterable[str], file: Path) -> _Encoded:
    """Write the tokens of all documents, each ended by the token `end`; a batch of documents at a time is in memory."""
    documents, counts = 0, np.zeros(count_ids(tokenizer), np.int64)
    with ArrayWriter(file, token_dtype(tokenizer)) as writer:
        for batch in batches(progress.over(texts, utf8_bytes), size=len):
            tokens = np.array([token for ids in encode_texts(tokenizer, batch) for token in (*ids, end)])
            counts += np.bincount(tokens, minlength=len(counts))
            writer.append(tokens)
            documents += len(batch)
    return _Encoded(documents, counts)


def token_dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    """The smallest type that holds every token."""
    return np.dtype(np.uint16 if count_ids(tokenizer) <= 2**16 else np.uint32)


class ArrayWriter:
    """Writes a .npy file of one dimension whose length is known only at the end; memory is independent of it."""

    def __init__(self, file: Path, dtype: np.dtype[Any]) -> None:
        self._file, self._dtype = file, dtype
        self.length = 0

    def __enter__(self) -> Self:
        """Open the file, and leave room for a header."""
        self._stream = self._file.open("w+b")
        self._write_header()
        return self

    def append(self, values: "Sequence[int] | NDArray[Any]") -> None:
        """Add values at the end."""
        self._stream.write(np.asarray(values, self._dtype).tobytes())
        self.length += len(values)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Write the header again, whose size does not depend on the length that it names."""
        with self._stream:
            if kind is None:
                self._stream.seek(0)
                self._write_header()

    def _write_header(self) -> None:
        described = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False}
        np.lib.format.write_array_header_1_0(self._stream, {**described, "shape": (self.length,)})


def batches(items: Iterable[_Item], size: Callable[[_Item], int] | None = None) -> Iterator[list[_Item]]:
    """The items in lists of a few hundred, as the tokenizer encodes them in parallel.

    Args:
        items: of any number.
        size: characters of an item; a list ends with the item that brings it to a million.
    """
    batch, characters = list[_Item](), 0
    for item in items:
        batch.append(item)
        characters += 0 if size is None else size(item)
        if len(batch) == _DOCUMENTS_PER_BATCH or characters >= _CHARACTERS_PER_BATCH:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def unigram_entropy(train: NDArray[np.int64], held_out: NDArray[np.int64]) -> float:
    """Cross-entropy in nats of held-out tokens under the training tokens' add-one unigram distribution.

    Args:
        train: how often each token comes, (vocab_size,) int64.
        held_out: likewise.
    """
    log_probabilities = np.log((train + 1) / (train + 1).sum())
    return float(-(held_out * log_probabilities).sum() / held_out.sum()) if held_out.any() else float("nan")
