"""Tokens that another program has made: arrays of numbers as nanoGPT and llm.c write them, or NumPy's .npy."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foundry.config.errors import ConfigError, Violation, shown
from foundry.config.schemas.data import TokenDtype
from foundry.data.cached_folder import cached_folder
from foundry.data.corpus import PATH, VALIDATION_PATH, find_corpus_files
from foundry.data.splits import DataSplits
from foundry.data.token_sequences import TokenSequences
from foundry.data.tokenizer import load_tokenizer

_FORMAT = 1
_KINDS = {".bin": "tokens", ".npy": "tokens"}
_FACTS = "facts.json"
_AT_A_TIME = 2**24
_MAGIC, _HEADER_NUMBERS = 20240520, 256
"""With which llm.c's files begin: 256 int32, of which the third is the number of tokens."""


@dataclass(frozen=True)
class _TokenFile:
    """Where the tokens of a file lie."""

    path: Path
    dtype: np.dtype[Any]
    offset: int
    count: int

    def part(self, start: int, stop: int) -> NDArray[Any]:
        """Some of its tokens, mapped."""
        if start == stop:
            return np.empty(0, self.dtype)
        return np.memmap(self.path, self.dtype, "r", self.offset + start * self.dtype.itemsize, (stop - start,))


class SequencesOfFiles:
    """The samples of several arrays of tokens, one array after the other; none goes from one into the next.

    Args:
        parts: the samples of each.
    """

    def __init__(self, parts: Sequence[TokenSequences]) -> None:
        self.parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        """Number of samples."""
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One sample: tokens and targets, (seq_len,) int64 each."""
        return {name: value[0] for name, value in self.batch([index]).items()}

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Samples stacked: tokens and targets, (len(indices), seq_len) int64 each.

        Raises:
            IndexError: an index is out of range.
        """
        wanted = np.asarray(indices, dtype=np.int64)
        if len(wanted) and (wanted.min() < 0 or wanted.max() >= len(self)):
            raise IndexError(f"samples {wanted.min()} to {wanted.max()} of a dataset of {len(self)}")
        of_part = np.searchsorted(self._ends, wanted, side="right")
        within = wanted - np.concatenate([[0], self._ends])[of_part]
        empty = torch.empty(len(wanted), self.parts[0].seq_len, dtype=torch.int64)
        found = {"tokens": empty, "targets": empty.clone()}
        for part in np.unique(of_part).tolist():
            rows = np.flatnonzero(of_part == part)
            for name, value in self.parts[part].batch(within[rows].tolist()).items():
                found[name][torch.from_numpy(rows)] = value
        return found


def token_files(
    *,
    seed: int,
    path: str,
    seq_len: int,
    vocab_size: int,
    held_out: float,
    cache_dir: str,
    dtype: TokenDtype = TokenDtype.uint16,
    validation_path: str | None = None,
    tokenizer: str | None = None,
    num_workers: int = 0,
) -> DataSplits:
    """Files of tokens, mapped into memory.

    Args:
        seed: unused: the split depends on the files only.
        path: file, folder or glob of .bin and .npy files.
        seq_len: tokens per sample.
        vocab_size: all tokens are below it.
        held_out: share of the end of each file for validation.
        cache_dir: folder for what is found out about the files.
        dtype: of the numbers in .bin files, which do not say it; of llm.c's uint16.
        validation_path: files for validation; None: hold out the end of each.
        tokenizer: tokenizer.json or folder that the tokens are of, for samples; None: there are none.
        num_workers: unused here: how the run's loader reads.

    Raises:
        ConfigError: there are no files, one is none of tokens, has a token beyond vocab_size, or is too short.
    """
    chosen = None if tokenizer is None else load_tokenizer(tokenizer, vocab_size)
    settings = f"tokens {_FORMAT} {dtype.name} {held_out}"
    found = find_corpus_files(path, validation_path, settings=settings, cache_dir=cache_dir, kinds=_KINDS)
    train = [_opened(file, dtype, PATH) for file in found.train]
    validation = [_opened(file, dtype, VALIDATION_PATH) for file in found.validation]
    name = hashlib.sha256(f"{found.content} {_FORMAT}".encode()).hexdigest()[:32]
    folder = cached_folder(cache_dir, name, partial(_look, [*train, *validation]), what="facts about tokens")
    _check_bounds([*train, *validation], json.loads((folder / _FACTS).read_text()), vocab_size)
    cuts = [file.count if validation else round(file.count * (1 - held_out)) for file in train]
    learnt = [file.part(0, cut) for file, cut in zip(train, cuts, strict=True)]
    kept = [file.part(0, file.count) for file in validation] or [
        file.part(cut, file.count) for file, cut in zip(train, cuts, strict=True)
    ]
    splits = [SequencesOfFiles([TokenSequences(part, seq_len) for part in parts]) for parts in (learnt, kept)]
    for split, parts in zip(("training", "validation"), (learnt, kept), strict=True):
        longest = max(map(len, parts))
        if longest <= seq_len:
            message = f"is {seq_len} but no file has so many and one more {split} tokens, the longest {longest}"
            raise ConfigError(Violation("data.seq_len", f"{message}; lower it, or give more"))
    return DataSplits(
        train=splits[0],
        validation=splits[1],
        fingerprint=f"{found.fingerprint}-{seq_len}",
        content=f"{found.content}-{seq_len}",
        tokens_per_sample=seq_len,
        tokenizer=None if chosen is None else chosen[0],
        stop_ids=() if chosen is None else (chosen[1],),
        notes={
            "train_tokens": sum(map(len, learnt)),
            "validation_tokens": sum(map(len, kept)),
            "dropped_train_tokens": sum(part.dropped_tokens for part in splits[0].parts),
            "dropped_validation_tokens": sum(part.dropped_tokens for part in splits[1].parts),
        },
    )


def _opened(file: Path, dtype: TokenDtype, key: str) -> _TokenFile:
    """Where the tokens of a file are.

    Raises:
        ConfigError: it holds none, or its size is none of whole tokens.
    """
    try:
        return _from_npy(file) if file.suffix == ".npy" else _from_bin(file, np.dtype(dtype.name))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(Violation(key, f"{file} {reason}; make it anew, or leave it out")) from None


def _from_npy(file: Path) -> _TokenFile:
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"is no array of NumPy ({' '.join(str(error).split())})") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"is an array of {array.dtype} with {array.ndim} dimensions, not of whole numbers with one")
    return _TokenFile(file, array.dtype, int(getattr(array, "offset", 0)), len(array))


def _from_bin(file: Path, dtype: np.dtype[Any]) -> _TokenFile:
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = np.frombuffer(stream.read(12).ljust(12, b"\0"), np.dtype("<i4"))
    if head[0] == _MAGIC:
        count, own = int(head[2]), np.dtype(np.uint16)
        if size != 4 * _HEADER_NUMBERS + count * own.itemsize:
            raise ValueError(f"has a header that says {count} tokens, but not as many")
        return _TokenFile(file, own, 4 * _HEADER_NUMBERS, count)
    if size == 0 or size % dtype.itemsize:
        raise ValueError(f"has {size} bytes, which are no tokens of {dtype} (data.dtype)")
    return _TokenFile(file, dtype, 0, size // dtype.itemsize)


def _look(files: Sequence[_TokenFile], folder: Path) -> tuple[str, ...]:
    """Write the smallest and the largest token of each file."""
    bounds = [[(int(part.min()), int(part.max())) for part in _parts(file)] or [(0, 0)] for file in files]
    facts = [[min(low for low, _ in found), max(high for _, high in found)] for found in bounds]
    (folder / _FACTS).write_text(json.dumps(facts))
    return (_FACTS,)


def _parts(file: _TokenFile) -> Iterator[NDArray[Any]]:
    for start in range(0, file.count, _AT_A_TIME):
        yield file.part(start, min(start + _AT_A_TIME, file.count))


def _check_bounds(files: Sequence[_TokenFile], bounds: Sequence[tuple[int, int]], vocab_size: int) -> None:
    """Refuse tokens that the model has no entry for.

    Raises:
        ConfigError: there is one; names file and token.
    """
    for file, (low, high) in zip(files, bounds, strict=True):
        if low < 0 or high >= vocab_size:
            message = f"is {vocab_size} but {shown(str(file.path))} has the token {low if low < 0 else high}"
            remedy = "other numbers than data.dtype says?" if low < 0 or high >= 2**20 else f"set it to {high + 1}"
            raise ConfigError(Violation("data.vocab_size", f"{message}; {remedy}"))
