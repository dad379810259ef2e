"""Index of a checkpoint's tensors, and reads of any part of them.

    checkpoints/step_00000200/tensors.json   by tensor name: dtype; file, position, offsets and sizes of each part

The index is built from the headers of all shards when a checkpoint is published, or when an older checkpoint without an
index is read. With the index, a rank opens only the files that hold its own parts. The header of each opened file must
match the index, so that a shard rewritten by another program is not read at outdated positions.
"""

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from foundry.checkpoint.folder import CheckpointError, read_manifest
from foundry.checkpoint.shard import DTYPES, Chunk
from foundry.parallel.gathering import broadcast
from foundry.parallel.process_group import World
from foundry.run_dir.checkpoints import MANIFEST
from foundry.run_dir.files import open_regular, read_text

INDEX = "tensors.json"

_TENSORS = ".safetensors"
_PIECE_BYTES, _MAX_BYTES = 2**24, 2**32
_NAMES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class _Part:
    """A part of a tensor in a file, stored in row-major order.

    Attributes:
        file: name of the file.
        begin: position of the part's first byte in the file.
        offsets: position of the part's first element in the whole tensor, one number per dimension.
        sizes: shape of the part.
    """

    file: str
    begin: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


Header = dict[str, tuple[str, int, list[int], list[int]]]
"""Header of a file: by tensor name, the safetensors name of the dtype, and begin, offsets and sizes as in `_Part`."""


@dataclass(frozen=True)
class TensorIndex:
    """The tensors of one checkpoint.

    Attributes:
        folder: the checkpoint.
        entries: content of the index file: by tensor name, the safetensors name of the dtype, and the file, begin,
            offsets and sizes of each part.
        num_bytes: size of each file that may be read, by name.
    """

    folder: Path
    entries: Mapping[str, tuple[str, list[tuple[str, int, list[int], list[int]]]]]
    num_bytes: Mapping[str, int]
    _headers: dict[str, Header] = field(default_factory=dict, repr=False)

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of all tensors by name."""
        return {name: self.shape(name) for name in self.entries}

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a tensor, computed from its parts."""
        ends = ([o + s for o, s in zip(offsets, sizes, strict=True)] for _, _, offsets, sizes in self.entries[name][1])
        return torch.Size(map(max, zip(*ends, strict=True)))

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor in the files."""
        return _NAMES[self.entries[name][0]]

    @torch.no_grad()
    def fill(self, chunks: Mapping[str, Chunk]) -> None:
        """Fill chunks, of any dtype on any device, from the files of the checkpoint; each file is opened once.

        Args:
            chunks: the chunks to fill, by the name of their tensor.

        Raises:
            CheckpointError: if the files lack a part of a chunk or contain it twice, or a file's header does not match
                the index.
        """
        by_file: dict[str, list[tuple[_Part, str]]] = defaultdict(list)
        missing = {name: chunk.local.numel() for name, chunk in chunks.items()}
        for name, chunk in chunks.items():
            for part in self._parts(name):
                if (num_elements := math.prod(stop - start for start, stop in _overlap(part, chunk))) > 0:
                    by_file[part.file].append((part, name))
                    missing[name] -= num_elements
        if short := [name for name, count in missing.items() if count]:
            raise CheckpointError(f"{self.folder} has missing or duplicate parts of {short[0]}")
        for file, parts in sorted(by_file.items()):
            with open_regular(self.folder / file, "rb", buffering=0) as stream:
                self._check_header(stream, file, parts)
                for part, name in sorted(parts, key=lambda pair: pair[0].begin):
                    _copy(stream, part, self.dtype(name), chunks[name])

    def _parts(self, name: str) -> Iterator[_Part]:
        width = self.dtype(name).itemsize
        for file, begin, offsets, sizes in self.entries[name][1]:
            part = _Part(file, begin, tuple(offsets), tuple(sizes))
            # Without this check a crafted file could request any amount of memory.
            if min(begin, *sizes, *offsets, 0) < 0 or begin + math.prod(sizes) * width > self.num_bytes[file]:
                raise CheckpointError(f"{self.folder} has a part of {name} beyond the end of {file}")
            yield part

    def _check_header(self, stream: IO[bytes], file: str, parts: list[tuple[_Part, str]]) -> None:
        """Compare the header of a file, which is read once, with the index.

        Raises:
            CheckpointError: if a tensor is missing or has another dtype, shape or position.
        """
        if file not in self._headers:
            self._headers[file] = _read_header(stream, self.folder / file)
        for part, name in parts:
            expected = self.entries[name][0], part.begin, list(part.offsets), list(part.sizes)
            if (actual := self._headers[file].get(name)) != expected:
                difference = "lacks it" if actual is None else f"has {_describe_entry(actual)}"
                message = f"{INDEX} lists {name} as {_describe_entry(expected)} but {file} {difference}"
                raise CheckpointError(f"{self.folder}: {message}; another program changed the file; restore it")


def read_index(folder: Path, world: World | None = None) -> TensorIndex:
    """Return the index of a checkpoint's tensors.

    Args:
        folder: the checkpoint.
        world: all its ranks call this function together, and only rank 0 reads files; with None, this process reads
            them.

    Raises:
        CheckpointError: on every rank, if the tensors cannot be read; without `world`, the error of reading is raised.
    """
    content: tuple[str, dict[str, int]] | str = ""
    if world is None or world.is_main:
        try:
            content = _read_text(folder)
        except Exception as error:
            if world is None:
                raise
            content = f"{folder}: {error}"
    if world is not None:
        content = broadcast(content, world)
    if isinstance(content, str):
        raise CheckpointError(content)
    entries = json.loads(content[0])
    if not isinstance(entries, dict):
        raise CheckpointError(f"{folder / INDEX} lists no tensors")
    return TensorIndex(folder, entries, content[1])


def build_index(folder: Path) -> str:
    """Return the content of the index file, built from the headers of all shards in a folder."""
    files = sorted(path.name for path in folder.iterdir() if path.name.endswith(_TENSORS))
    return merge_headers({file: read_header(folder / file) for file in files})


def read_header(file: Path) -> Header:
    """Return the header of a shard.

    Raises:
        CheckpointError: if the file is not a valid .safetensors file.
    """
    with open_regular(file, "rb") as stream:
        return _read_header(stream, file)


def merge_headers(headers: Mapping[str, Header]) -> str:
    """Return the content of the index file, given the header of each shard by the name of its file, sorted."""
    entries: dict[str, tuple[str, list[Any]]] = {}
    for file, header in headers.items():
        for name, (dtype, begin, offsets, sizes) in header.items():
            entries.setdefault(name, (dtype, []))[1].append((file, begin, offsets, sizes))
    return json.dumps(entries, separators=(",", ":"))


def _read_header(stream: IO[bytes], path: Path) -> Header:
    """Read the header of an opened .safetensors file.

    Raises:
        CheckpointError: if the file is not a valid .safetensors file.
    """
    size = int.from_bytes(stream.read(8), "little")
    if size > os.fstat(stream.fileno()).st_size:
        raise CheckpointError(f"{path} is not a .safetensors file")
    try:
        header = json.loads(stream.read(size))
        sharding = json.loads(header.pop("__metadata__", {}).get("DCP_SHARDING_INFO", "{}"))
        parts = Header()
        for name, entry in header.items():
            sizes, (begin, end) = list(entry["shape"]), entry["data_offsets"]
            if end - begin != math.prod(sizes) * _NAMES[entry["dtype"]].itemsize:
                raise ValueError(f"the size of {name} does not match its dtype and shape")
            offsets = sharding[name]["saved_offsets"] if name in sharding else [0] * len(sizes)
            parts[name] = entry["dtype"], 8 + size + begin, list(offsets), sizes
        return parts
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} has a header that cannot be read: {error}") from None


def _describe_entry(entry: tuple[str, int, list[int], list[int]]) -> str:
    dtype, begin, offsets, sizes = entry
    return f"{dtype} {sizes} at byte {begin}" + (f" from {offsets} on" if any(offsets) else "")


def _read_text(folder: Path) -> tuple[str, dict[str, int]]:
    if (folder / MANIFEST).is_file():
        sizes = {name: facts.bytes for name, facts in read_manifest(folder).files.items()}
    else:
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    return read_text(folder / INDEX, max_bytes=_MAX_BYTES) if INDEX in sizes else build_index(folder), sizes


def _overlap(part: _Part, chunk: Chunk) -> list[tuple[int, int]]:
    """Return per dimension the range, start and stop in the whole tensor, that a part and a chunk have in common."""
    ends = zip(part.offsets, part.sizes, chunk.offsets, chunk.local.shape, strict=True)
    return [(start := max(p, c), max(start, min(p + p_size, c + c_size))) for p, p_size, c, c_size in ends]


def _copy(stream: IO[bytes], part: _Part, dtype: torch.dtype, chunk: Chunk) -> None:
    """Copy the common elements of a part and a chunk, a few rows at a time; rows of the file are read completely."""
    overlap = _overlap(part, chunk) or [(0, 1)]
    sizes, offsets, chunk_offsets = part.sizes or (1,), part.offsets or (0,), chunk.offsets or (0,)
    target = chunk.local if chunk.local.ndim else chunk.local.view(1)
    row_bytes = math.prod(sizes[1:]) * dtype.itemsize
    (first, last), rest = overlap[0], overlap[1:]
    columns = tuple(slice(a - o, b - o) for (a, b), o in zip(rest, offsets[1:], strict=True))
    places = tuple(slice(a - o, b - o) for (a, b), o in zip(rest, chunk_offsets[1:], strict=True))
    num_rows = max(1, _PIECE_BYTES // row_bytes)
    for row in range(first, last, num_rows):
        count = min(num_rows, last - row)
        buffer = torch.empty(count * row_bytes, dtype=torch.uint8)
        stream.seek(part.begin + (row - offsets[0]) * row_bytes)
        view = memoryview(buffer.numpy())  # type: ignore[arg-type] # numpy's arrays are buffers
        while view:
            if not (length := stream.readinto(view)):  # type: ignore[attr-defined] # opened without a buffer
                raise CheckpointError(f"{part.file} is shorter than its tensors")
            view = view[length:]
        rows = buffer.view(dtype).view(count, *sizes[1:])
        target[(slice(row - chunk_offsets[0], row - chunk_offsets[0] + count), *places)].copy_(
            rows[(slice(None), *columns)]
        )
