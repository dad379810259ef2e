"""Location of the tokens in a file of another program: nanoGPT, llm.c, Megatron-LM, or NumPy (.npy)."""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foundry.config.schemas.data import TokenDtype
from foundry.core.errors import ConfigError, Violation

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
class TokenFile:
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

    def parts(self) -> Iterator[NDArray[Any]]:
        """Yield all tokens, a memory-mapped slice at a time."""
        for start in range(0, self.count, _AT_A_TIME):
            yield self.part(start, min(start + _AT_A_TIME, self.count))

    @property
    def has_index(self) -> bool:
        """Whether the file has an index of Megatron-LM beside it."""
        return self.path.with_suffix(_INDEX).is_file()


def locate_tokens(file: Path, dtype: TokenDtype, key: str) -> TokenFile:
    """Locate the tokens in a file.

    Raises:
        ConfigError: the file cannot be read, or its format or size is wrong.
    """
    try:
        return _from_npy(file) if file.suffix == ".npy" else _from_bin(file, np.dtype(dtype.name))
    except (OSError, ValueError) as error:
        reason = f"cannot be read: {error.strerror}" if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(Violation(key, f"{file} {reason}; create it again or leave it out")) from None


def _from_npy(file: Path) -> TokenFile:
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"is not a NumPy array ({' '.join(str(error).split())})") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"is an array of {array.dtype} with {array.ndim} dimensions, not a one-dimensional array of integers"
        )
    return TokenFile(file, array.dtype, int(getattr(array, "offset", 0)), len(array))


def _from_bin(file: Path, dtype: np.dtype[Any]) -> TokenFile:
    size = file.stat().st_size
    if (index := file.with_suffix(_INDEX)).is_file():
        return _from_indexed(file, index, size)
    with file.open("rb") as stream:
        head = np.frombuffer(stream.read(12).ljust(12, b"\0"), np.dtype("<i4"))
    if head[0] == _MAGIC:
        count, token_dtype = int(head[2]), np.dtype(np.uint16)
        if size != 4 * _HEADER_NUMBERS + count * token_dtype.itemsize:
            raise ValueError(f"has a header with {count} tokens, but a size that does not match")
        return TokenFile(file, token_dtype, 4 * _HEADER_NUMBERS, count)
    if size == 0 or size % dtype.itemsize:
        raise ValueError(f"has {size} bytes, which is not a positive multiple of the size of {dtype} (data.dtype)")
    return TokenFile(file, dtype, 0, size // dtype.itemsize)


def _from_indexed(file: Path, index: Path, size: int) -> TokenFile:
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
    return TokenFile(file, dtype, 0, count)
