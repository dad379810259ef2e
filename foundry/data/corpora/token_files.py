"""Dataset of token files written by other programs: nanoGPT, llm.c, Megatron-LM, or NumPy (.npy)."""

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foundry.config.configured import configured_by
from foundry.config.schemas.data import PackingStrategy
from foundry.config.schemas.data import TokenFiles as TokenFilesSettings
from foundry.config.sources import listed_paths
from foundry.core.errors import ConfigError, Violation, as_text
from foundry.data.corpora.corpus import PATH, VALIDATION_PATH, find_corpus_files
from foundry.data.corpora.packed_sequences import describe_padding, describe_strategy, mean_tokens, packed_sequences
from foundry.data.corpora.token_file import TokenFile, locate_tokens
from foundry.data.corpora.token_sequences import Reordered, SequencesOfFiles
from foundry.data.corpora.tokenizer import load_tokenizer
from foundry.data.dataset import Dataset
from foundry.data.io.cached_folder import cached_folder
from foundry.data.mixture import describe_sources, describe_weights, interleaved, mixture_of
from foundry.data.splits import DataSplits

_FORMAT = 1
_KINDS = {".bin": "tokens", ".npy": "tokens"}
_FACTS = "facts.json"


@configured_by(TokenFilesSettings)
def token_files(settings: TokenFilesSettings, *, seed: int = 0) -> DataSplits:
    """Build splits of memory-mapped token files; the split does not depend on the seed.

    Raises:
        ConfigError: there are no files, a file cannot be read or has a token outside vocab_size, or no file of a source
            is long enough for a sample.
    """
    seq_len = settings.seq_len
    tokenizer, end = None, None
    if settings.tokenizer is not None:
        tokenizer, end = load_tokenizer(settings.tokenizer, settings.vocab_size)
    located = _locate_sources(settings)
    _check_tokens(located, settings)
    share = 0.0 if located.validation else settings.held_out
    train_parts = [[file.part(0, file.split_index(share)) for file in source] for source in located.train]
    if located.validation:
        validation_parts = [[file.part(0, file.count) for file in source] for source in located.validation]
    else:
        validation_parts = [
            [file.part(file.split_index(share), file.count) for file in source] for source in located.train
        ]
    paths = listed_paths(settings.path)
    _check_lengths("training", train_parts, seq_len, paths)
    _check_lengths("validation", [[part for source in validation_parts for part in source]], seq_len, paths)
    validation = [SequencesOfFiles.of(parts, seq_len) for parts in validation_parts]
    if settings.packing_strategy is PackingStrategy.best_fit:
        assert end is not None  # the schema requires a tokenizer
        names = [f"{located.content} {number} {share}" for number in range(len(train_parts))]
        train = [_pack(parts, end, settings, name) for parts, name in zip(train_parts, names, strict=True)]
    else:
        train = [SequencesOfFiles.of(parts, seq_len) for parts in train_parts]
    sequences, sizes = [part for source in train for part in source.parts], [len(source) for source in train]
    notes: dict[str, Any] = {
        "train_tokens": _count_tokens(train_parts),
        "validation_tokens": _count_tokens(validation_parts),
        "dropped_train_tokens": _count_dropped(train),
        "dropped_validation_tokens": _count_dropped(validation),
        **describe_padding(sequences),
    }
    if len(train) > 1:
        notes["sources"] = describe_sources(paths, sizes, settings.weights)
    mixed = describe_weights(settings.weights) + describe_strategy(settings.packing_strategy)
    return DataSplits(
        train=SequencesOfFiles(sequences),
        validation=_evenly(validation),
        fingerprint=f"{located.fingerprint}-{seq_len}{mixed}",
        content=f"{located.content}-{seq_len}{mixed}",
        mixture=mixture_of(sizes, settings.weights),
        tokens_per_sample=mean_tokens(sequences),
        max_tokens=seq_len,
        tokenizer=tokenizer,
        stop_ids=() if end is None else (end,),
        notes=notes,
    )


class _Located(NamedTuple):
    """Token files of each source, and their hashes with and without file names."""

    train: list[list[TokenFile]]
    validation: list[list[TokenFile]]
    fingerprint: str
    content: str

    @property
    def files(self) -> list[TokenFile]:
        """All files of all sources."""
        return [file for source in (*self.train, *self.validation) for file in source]


def _locate_sources(settings: TokenFilesSettings) -> _Located:
    """Find the files of each source and the tokens in them.

    Raises:
        ConfigError: there are no files, or a file cannot be read.
    """
    description = f"tokens {_FORMAT} {settings.dtype.name} {settings.held_out}"
    found = find_corpus_files(settings, description=description, kinds=_KINDS)
    train, validation = (
        [[locate_tokens(file, settings.dtype, key) for file in source] for source in sources]
        for sources, key in ((found.train, PATH), (found.validation, VALIDATION_PATH))
    )
    located = _Located(train, validation, found.fingerprint, found.content)
    indexed = [file.dtype.name if file.has_index else "" for file in located.files]
    if any(indexed):
        located = located._replace(fingerprint=f"{found.fingerprint} {indexed}", content=f"{found.content} {indexed}")
    return located


def _check_tokens(located: _Located, settings: TokenFilesSettings) -> None:
    """Check that all token ids are within the vocabulary; the smallest and the largest ids of the files are cached.

    Raises:
        ConfigError: a token id is negative or too large; the message has file and token.
    """
    name = hashlib.sha256(f"{located.content} {_FORMAT}".encode()).hexdigest()[:32]
    write = partial(_write_facts, located.files)
    folder = cached_folder(settings.cache_dir, name, write, contents="token statistics")
    _check_bounds(located.files, json.loads((folder / _FACTS).read_text()), settings.vocab_size)


def _pack(parts: Sequence[NDArray[Any]], end: int, settings: TokenFilesSettings, fingerprint: str) -> SequencesOfFiles:
    """Return the sequences of one source, packed with the documents that the token `end` ends."""
    return SequencesOfFiles(
        packed_sequences(
            parts, end=end, seq_len=settings.seq_len, cache_dir=settings.cache_dir, fingerprint=fingerprint
        )
    )


def _count_tokens(sources: Sequence[Sequence[NDArray[Any]]]) -> int:
    return sum(len(part) for source in sources for part in source)


def _count_dropped(sources: Sequence[SequencesOfFiles]) -> int:
    return sum(part.dropped_tokens for source in sources for part in source.parts)


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


def _write_facts(files: Sequence[TokenFile], folder: Path) -> tuple[str, ...]:
    """Write the smallest and the largest token id of each file, and return the names of the written files."""
    bounds = [[(int(part.min()), int(part.max())) for part in file.parts()] or [(0, 0)] for file in files]
    facts = [[min(low for low, _ in pairs), max(high for _, high in pairs)] for pairs in bounds]
    (folder / _FACTS).write_text(json.dumps(facts))
    return (_FACTS,)


def _check_bounds(files: Sequence[TokenFile], bounds: Sequence[tuple[int, int]], vocab_size: int) -> None:
    """Check that all token ids are within the vocabulary.

    Raises:
        ConfigError: a token id is negative or too large; the message has file and token.
    """
    for file, (low, high) in zip(files, bounds, strict=True):
        if low < 0 or high >= vocab_size:
            message = f"is {vocab_size} but {as_text(str(file.path))} has the token {low if low < 0 else high}"
            remedy = "check that data.dtype matches the file" if low < 0 or high >= 2**20 else f"set it to {high + 1}"
            raise ConfigError(Violation("data.vocab_size", f"{message}; {remedy}"))
