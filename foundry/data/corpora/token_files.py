"""Dataset of token files written by other programs: nanoGPT, llm.c, Megatron-LM, or NumPy (.npy)."""

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foundry.config.configured import configured_by
from foundry.config.schemas.data import PackingStrategy, TokenDtype
from foundry.config.schemas.data import TokenFiles as TokenFilesSettings
from foundry.config.sources import listed_paths
from foundry.core.errors import ConfigError, Violation, as_text
from foundry.data.corpora.corpus import PATH, VALIDATION_PATH, find_corpus_files
from foundry.data.corpora.packed_sequences import describe_padding, describe_strategy, mean_tokens, packed_sequences
from foundry.data.corpora.token_sequences import Reordered, SequencesOfFiles
from foundry.data.corpora.tokenizer import load_tokenizer
from foundry.data.dataset import Dataset
from foundry.data.io.cached_folder import cached_folder
from foundry.data.mixture import describe_sources, describe_weights, interleaved, mixture_of
from foundry.data.splits import DataSplits

_FORMAT = 1
_KINDS = {".bin": "tokens", ".npy": "tokens"}
_FACTS = "facts.json"
_AT_A_TIME = 2**24
_MAGIC, _HEADER_NUMBERS = 20240520, 256
"""Magic number and length of the header of llm.c's files: 256 int32, the third of which is the number of tokens."""

_INDEX, _INDEX_MAGIC, _INDEX_HEAD = ".idx", b"MMIDIDX\0\0", struct.Struct("<9sQBQQ")
"""Suffix, magic bytes and header of the index that Megatron-LM writes for a .bin file.

The header has the magic bytes, the version, the dtype code, and the numbers of sequences and of documents. The lengths
of the sequences (int32) and their byte offsets (int64) follow (megatron/core/datasets/indexed_dataset.py).
"""
_INDEX_TYPES: Mapping[int, type[np.generic]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}


@dataclass(frozen=True)
class _TokenFile:
    """Location of the tokens in a file: byte offset, dtype and number of tokens."""

    path: Path
    dtype: np.dtype[Any]
    offset: int
    count: int

    def split_index(self, held_out: float) -> int:
        """Return the index of the first held-out token."""
        return round(self.count * (1 - held_out))

    def part(self, start: int, stop: int) -> NDArray[Any]:
        """Return a memory-mapped slice of the tokens."""
        if start == stop:
            return np.empty(0, self.dtype)
        return np.memmap(self.path, self.dtype, "r", self.offset + start * self.dtype.itemsize, (stop - start,))


@configured_by(TokenFilesSettings)
def token_files(settings: TokenFilesSettings, *, seed: int = 0) -> DataSplits:
    """Build splits of memory-mapped token files; the split does not depend on the seed.

    Raises:
        ConfigError: there are no files, a file cannot be read or has a token outside vocab_size, or no file of a source
            is long enough for a sample.
    """
    seq_len, vocab_size, dtype, held_out = settings.seq_len, settings.vocab_size, settings.dtype, settings.held_out
    tokenizer_and_end = None if settings.tokenizer is None else load_tokenizer(settings.tokenizer, vocab_size)
    description = f"tokens {_FORMAT} {dtype.name} {held_out}"
    corpus_files = find_corpus_files(settings, description=description, kinds=_KINDS)
    train = [[_locate_tokens(file, dtype, PATH) for file in source] for source in corpus_files.train]
    validation = [
        [_locate_tokens(file, dtype, VALIDATION_PATH) for file in source] for source in corpus_files.validation
    ]
    files = [file for source in (*train, *validation) for file in source]
    indexed = [file.dtype.name if file.path.with_suffix(_INDEX).is_file() else "" for file in files]
    if any(indexed):
        corpus_files = corpus_files._replace(
            content=f"{corpus_files.content} {indexed}", fingerprint=f"{corpus_files.fingerprint} {indexed}"
        )
    name = hashlib.sha256(f"{corpus_files.content} {_FORMAT}".encode()).hexdigest()[:32]
    folder = cached_folder(settings.cache_dir, name, partial(_write_facts, files), contents="token statistics")
    _check_bounds(files, json.loads((folder / _FACTS).read_text()), vocab_size)
    share = 0.0 if validation else held_out
    train_parts = [[file.part(0, file.split_index(share)) for file in source] for source in train]
    validation_parts = [
        [file.part(0 if validation else file.split_index(share), file.count) for file in s] for s in validation or train
    ]
    paths = listed_paths(settings.path)
    _check_lengths("training", train_parts, seq_len, paths)
    _check_lengths("validation", [[part for source in validation_parts for part in source]], seq_len, paths)
    train_sources, validation_sources = (
        [SequencesOfFiles.of(parts, seq_len) for parts in sources] for sources in (train_parts, validation_parts)
    )
    if settings.packing_strategy is PackingStrategy.best_fit:
        assert tokenizer_and_end is not None  # the schema requires a tokenizer
        train_sources = [
            SequencesOfFiles(
                packed_sequences(
                    parts,
                    end=tokenizer_and_end[1],
                    seq_len=seq_len,
                    cache_dir=settings.cache_dir,
                    fingerprint=f"{corpus_files.content} {number} {share}",
                )
            )
            for number, parts in enumerate(train_parts)
        ]
    sequences = [part for source in train_sources for part in source.parts]
    sizes, mixed = [len(source) for source in train_sources], describe_weights(settings.weights)
    mixed += describe_strategy(settings.packing_strategy)
    notes: dict[str, Any] = {
        "train_tokens": sum(len(part) for source in train_parts for part in source),
        "validation_tokens": sum(len(part) for source in validation_parts for part in source),
        "dropped_train_tokens": sum(part.dropped_tokens for part in sequences),
        "dropped_validation_tokens": sum(part.dropped_tokens for source in validation_sources for part in source.parts),
    }
    notes |= describe_padding(sequences)
    if len(train) > 1:
        notes["sources"] = describe_sources(paths, sizes, settings.weights)
    return DataSplits(
        train=SequencesOfFiles(sequences),
        validation=_evenly(validation_sources),
        fingerprint=f"{corpus_files.fingerprint}-{seq_len}{mixed}",
        content=f"{corpus_files.content}-{seq_len}{mixed}",
        mixture=mixture_of(sizes, settings.weights),
        tokens_per_sample=mean_tokens(sequences),
        max_tokens=seq_len,
        tokenizer=None if tokenizer_and_end is None else tokenizer_and_end[0],
        stop_ids=() if tokenizer_and_end is None else (tokenizer_and_end[1],),
        notes=notes,
    )


def _check_lengths(split: str, sources: Sequence[Sequence[NDArray[Any]]], seq_len: int, paths: Sequence[str]) -> None:
    """Check that each source has a file that is long enough for a sample.

    Raises:
        ConfigError: all files of a source are too short.
    """
    for source, path in zip(sources, paths, strict=False):
        if (longest := max(map(len, source))) <= seq_len:
            source_text = f" of {path}" if len(sources) > 1 else ""
            message = (
                f"is {seq_len} but no file{source_text} has more {split} tokens than that; the longest has {longest}"
            )
            raise ConfigError(Violation("data.seq_len", f"{message}; lower it, or give longer files"))


def _evenly(sources: Sequence[SequencesOfFiles]) -> Dataset:
    """Return the samples of all sources, evenly interleaved."""
    sequences = SequencesOfFiles([part for source in sources for part in source.parts])
    if len(sources) == 1:
        return sequences
    ends = np.cumsum([len(source) for source in sources]).tolist()
    ranges = [range(end - len(source), end) for source, end in zip(sources, ends, strict=True)]
    return Reordered(
        sequences, np.fromiter(interleaved(ranges, [len(indices) for indices in ranges]), np.int64, len(sequences))
    )


def _locate_tokens(file: Path, dtype: TokenDtype, key: str) -> _TokenFile:
    """Locate the tokens in a file.

    Raises:
        ConfigError: the file cannot be read, or its format or size is wrong.
    """
    try:
        return _from_npy(file) if file.suffix == ".npy" else _from_bin(file, np.dtype(dtype.name))
    except (OSError, ValueError) as error:
        reason = f"cannot be read: {error.strerror}" if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(Violation(key, f"{file} {reason}; create it again or leave it out")) from None


def _from_npy(file: Path) -> _TokenFile:
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"is not a NumPy array ({' '.join(str(error).split())})") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"is an array of {array.dtype} with {array.ndim} dimensions, not a one-dimensional array of integers"
        )
    return _TokenFile(file, array.dtype, int(getattr(array, "offset", 0)), len(array))


def _from_bin(file: Path, dtype: np.dtype[Any]) -> _TokenFile:
    size = file.stat().st_size
    if (index := file.with_suffix(_INDEX)).is_file():
        return _from_indexed(file, index, size)
    with file.open("rb") as stream:
        head = np.frombuffer(stream.read(12).ljust(12, b"\0"), np.dtype("<i4"))
    if head[0] == _MAGIC:
        count, token_dtype = int(head[2]), np.dtype(np.uint16)
        if size != 4 * _HEADER_NUMBERS + count * token_dtype.itemsize:
            raise ValueError(f"has a header with {count} tokens, but a size that does not match")
        return _TokenFile(file, token_dtype, 4 * _HEADER_NUMBERS, count)
    if size == 0 or size % dtype.itemsize:
        raise ValueError(f"has {size} bytes, which is not a positive multiple of the size of {dtype} (data.dtype)")
    return _TokenFile(file, dtype, 0, size // dtype.itemsize)


def _from_indexed(file: Path, index: Path, size: int) -> _TokenFile:
    """Locate the tokens of a Megatron-LM dataset, which is a .bin file of concatenated sequences with an index file."""
    head = _INDEX_HEAD.unpack(index.open("rb").read(_INDEX_HEAD.size).ljust(_INDEX_HEAD.size, b"\0"))
    magic, version, code, sequences, _ = head
    if magic != _INDEX_MAGIC or version != 1 or code not in _INDEX_TYPES:
        raise ValueError(f"is next to {index.name}, which is not a Megatron-LM index of integer tokens, version 1")
    dtype = np.dtype(_INDEX_TYPES[code])
    if index.stat().st_size < _INDEX_HEAD.size + 12 * sequences:
        raise ValueError(f"is next to {index.name}, which is too short for its {sequences} sequences")
    lengths = np.memmap(index, "<i4", "r", _INDEX_HEAD.size, (sequences,)) if sequences else np.empty(0, np.int32)
    count = int(lengths.sum(dtype=np.int64))
    if count * dtype.itemsize != size or (count and int(lengths.min()) < 0):
        raise ValueError(f"has {size} bytes, but {index.name} lists {count} tokens of {dtype}")
    return _TokenFile(file, dtype, 0, count)


def _write_facts(files: Sequence[_TokenFile], folder: Path) -> tuple[str, ...]:
    """Write the smallest and the largest token id of each file, and return the names of the written files."""
    bounds = [[(int(part.min()), int(part.max())) for part in _parts(file)] or [(0, 0)] for file in files]
    facts = [[min(low for low, _ in pairs), max(high for _, high in pairs)] for pairs in bounds]
    (folder / _FACTS).write_text(json.dumps(facts))
    return (_FACTS,)


def _parts(file: _TokenFile) -> Iterator[NDArray[Any]]:
    for start in range(0, file.count, _AT_A_TIME):
        yield file.part(start, min(start + _AT_A_TIME, file.count))


def _check_bounds(files: Sequence[_TokenFile], bounds: Sequence[tuple[int, int]], vocab_size: int) -> None:
    """Check that all token ids are within the vocabulary.

    Raises:
        ConfigError: a token id is negative or too large; the message has file and token.
    """
    for file, (low, high) in zip(files, bounds, strict=True):
        if low < 0 or high >= vocab_size:
            message = f"is {vocab_size} but {as_text(str(file.path))} has the token {low if low < 0 else high}"
            remedy = "check that data.dtype matches the file" if low < 0 or high >= 2**20 else f"set it to {high + 1}"
            raise ConfigError(Violation("data.vocab_size", f"{message}; {remedy}"))
