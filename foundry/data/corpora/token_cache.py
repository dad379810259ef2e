"""Cache of tokenized corpora on disk, built once and shared by all ranks and runs."""

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
    find_end_token,
    load_tokenizer,
    train_tokenizer,
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
    """Statistics of a tokenized corpus.

    Attributes:
        documents: number of documents in both splits.
        train_tokens, validation_tokens: number of tokens, end-of-document tokens included.
        unigram_entropy: cross-entropy in nats per validation token under the unigram distribution of the training
            tokens, with one added to every count: the loss of a model that knows token frequencies only.
    """

    documents: int
    train_tokens: int
    validation_tokens: int
    unigram_entropy: float


@dataclass(frozen=True)
class TokenisedCorpus:
    """Tokenized corpus in the cache, with memory-mapped arrays; the token `end` ends each document.

    Attributes:
        train: training tokens of each source; usually there is only one source.
    """

    fingerprint: str
    tokenizer: Tokenizer
    end: int
    train: tuple[TokenArray, ...]
    validation: TokenArray
    statistics: TokenStatistics


def tokenize_corpus(corpus: Corpus, settings: Tokenised) -> TokenisedCorpus:
    """Tokenize a corpus into the cache, or open the cached result.

    Raises:
        ConfigError: the tokenizer cannot be read or has more than vocab_size entries, a document cannot be read, or the
            cache cannot be written.
    """
    vocab_size = settings.vocab_size
    tokenizer_and_end = None if settings.tokenizer is None else load_tokenizer(settings.tokenizer, vocab_size)
    description = "" if tokenizer_and_end is None else tokenizer_and_end[0].to_str()
    if tokenizer_and_end is not None and tokenizer_and_end[1] != find_end_token(tokenizer_and_end[0]):
        description += f" {tokenizer_and_end[1]}"
    # This fingerprint seeds the sample order of a run: if its format changed, resumed runs would read other samples.
    description = f"{_FORMAT} {vocab_size} {description} {corpus.fingerprint}"
    fingerprint = hashlib.sha256(description.encode()).hexdigest()[:32]
    folder = cached_folder(settings.cache_dir, fingerprint, partial(_build, corpus, vocab_size, tokenizer_and_end))
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    return TokenisedCorpus(
        fingerprint,
        tokenizer,
        trained_end_token(tokenizer) if tokenizer_and_end is None else tokenizer_and_end[1],
        tuple(np.load(file, mmap_mode="r", allow_pickle=False) for file in _train_files(folder)),
        np.load(folder / _VALIDATION, mmap_mode="r", allow_pickle=False),
        TokenStatistics(**json.loads(read_text(folder / _STATISTICS))),
    )


def _train_files(folder: Path) -> list[Path]:
    """Return the file of training tokens of each source."""
    files = sorted(folder.glob(_TRAIN_OF_SOURCE.format("*")), key=lambda file: int(file.stem.rpartition("_")[2]))
    return files or [folder / _TRAIN]


def _build(
    corpus: Corpus, vocab_size: int, tokenizer_and_end: tuple[Tokenizer, int] | None, folder: Path
) -> tuple[str, ...]:
    """Write tokenizer, tokens and statistics, and return the names of the written files."""
    train_texts, validation_texts, num_bytes = corpus.read()
    if tokenizer_and_end is None:
        training_progress = ReadingProgress("training a tokenizer")
        tokenizer_and_end = train_with_end(training_progress.over(train_texts, utf8_bytes), vocab_size)
    tokenizer, end = tokenizer_and_end
    tokenizer.save(str(folder / TOKENIZER))
    sources = parts_of(train_texts)
    names = [_TRAIN] if len(sources) == 1 else [_TRAIN_OF_SOURCE.format(number) for number in range(len(sources))]
    progress = ReadingProgress("tokenizing", num_bytes)
    encode = partial(_encode, progress, tokenizer, end)
    encoded = [encode(texts, folder / name) for texts, name in zip(sources, names, strict=True)]
    train = _Encoded(sum(part.documents for part in encoded), np.sum([part.counts for part in encoded], axis=0))
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
    """Train a BPE tokenizer of at most `vocab_size` entries, and return it and the id of its end-of-document token."""
    tokenizer = train_tokenizer(texts, vocab_size)
    return tokenizer, trained_end_token(tokenizer)


def trained_end_token(tokenizer: Tokenizer) -> int:
    """Return the id of the end-of-document token of a tokenizer trained by `train_tokenizer`."""
    end: int | None = tokenizer.token_to_id(END_OF_DOCUMENT)
    assert end is not None
    return end


class _Encoded(NamedTuple):
    """Number of documents in a token file, and the count of each token id, (ids,) int64."""

    documents: int
    counts: NDArray[np.int64]


def _encode(progress: ReadingProgress, tokenizer: Tokenizer, end: int, texts: Iterable[str], file: Path) -> _Encoded:
    """Write the tokens of all documents, each followed by the token `end`, one batch of documents at a time."""
    documents, counts = 0, np.zeros(count_ids(tokenizer), np.int64)
    with ArrayWriter(file, token_dtype(tokenizer)) as writer:
        for batch in batches(progress.over(texts, utf8_bytes), size=len):
            tokens = np.array([token for ids in encode_texts(tokenizer, batch) for token in (*ids, end)])
            counts += np.bincount(tokens, minlength=len(counts))
            writer.append(tokens)
            documents += len(batch)
    return _Encoded(documents, counts)


def token_dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    """Return uint16 if it can hold every token id, else uint32."""
    return np.dtype(np.uint16 if count_ids(tokenizer) <= 2**16 else np.uint32)


class ArrayWriter:
    """Streaming writer of a one-dimensional .npy file whose length is known only at the end."""

    def __init__(self, file: Path, dtype: np.dtype[Any]) -> None:
        self._file, self._dtype = file, dtype
        self.length = 0

    def __enter__(self) -> Self:
        """Open the file, and write a preliminary header."""
        self._stream = self._file.open("w+b")
        self._write_header()
        return self

    def append(self, values: "Sequence[int] | NDArray[Any]") -> None:
        """Append values to the file."""
        self._stream.write(np.asarray(values, self._dtype).tobytes())
        self.length += len(values)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Close the file, after writing the final length into its header unless an exception was raised."""
        with self._stream:
            if kind is None:
                self._stream.seek(0)
                self._write_header()

    def _write_header(self) -> None:
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False}
        np.lib.format.write_array_header_1_0(self._stream, {**header, "shape": (self.length,)})


def batches(items: Iterable[_Item], size: Callable[[_Item], int] | None = None) -> Iterator[list[_Item]]:
    """Yield the items in batches of at most 256, which the tokenizer encodes in parallel.

    Args:
        items: any number of items.
        size: returns the characters of an item; a batch also ends when it reaches 2**20 characters. None disables this
            limit.
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
    """Return the cross-entropy in nats of the validation tokens under the unigram distribution of the training tokens.

    One is added to every training count. The result is NaN if there are no validation tokens.

    Args:
        train: count of each token id in the training split, (ids,) int64.
        held_out: count of each token id in the validation split, (ids,) int64.
    """
    log_probabilities = np.log((train + 1) / (train + 1).sum())
    return float(-(held_out * log_probabilities).sum() / held_out.sum()) if held_out.any() else float("nan")
