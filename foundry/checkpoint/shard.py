"""One rank's file of a checkpoint: which tensors it writes, copied to host memory first or not.

The format is safetensors with torch.distributed.checkpoint's offsets in the header, as `HuggingFaceStorageWriter`
writes with `save_distributed`, and `HuggingFaceStorageReader` reads it. That writer gathers every rank's plan on one
and builds the file in memory twice, holding the interpreter; here a rank knows its share from the layout, and tensors
go to the disk from where they are, summed on the way.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import xxhash
from torch import Tensor

from foundry.checkpoint.folder import FileFacts
from foundry.core.sharded import is_sharded, local_part
from foundry.parallel.device import finish_copies
from foundry.run_dir.files import open_regular

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What safetensors can hold, and its names for it."""

_BUFFER_BYTES, _ALIGNMENT_BYTES = 2**20, 8
_SYNCED_BYTES = 2**30


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor.

    Attributes:
        local: this rank's part.
        offsets: where it begins in the whole, one number per dimension.
    """

    local: Tensor
    offsets: tuple[int, ...]


def own_chunks(tensors: Mapping[str, Tensor], *, rank: int, world_size: int) -> dict[str, Chunk]:
    """What this rank writes: its shards, and of what several ranks hold alike its share.

    No rank asks another: all compute the same division.

    Args:
        tensors: the same names on every rank; DTensors sharded in any way, others equal on all ranks.
        rank: this one.
        world_size: ranks.
    """
    loads = [0] * world_size
    own: dict[str, Tensor] = {}
    largest_first = sorted(tensors, key=lambda name: (-_num_bytes(tensors[name]), name))
    for index, name in enumerate(largest_first):
        tensor = tensors[name]
        if is_sharded(tensor):
            if _is_writer(tensor, index):
                own[name] = tensor
            continue
        writer = loads.index(min(loads))
        loads[writer] += _num_bytes(tensor)
        if writer == rank:
            own[name] = tensor
    return local_chunks(own)


def local_chunks(tensors: Mapping[str, Tensor]) -> dict[str, Chunk]:
    """What this rank holds of tensors, sharded or whole; none of what it holds nothing of."""
    chunks: dict[str, Chunk] = {}
    offsets = _offsets({name: tensor for name, tensor in tensors.items() if is_sharded(tensor)})
    for name, tensor in tensors.items():
        local = local_part(tensor)
        if local.numel() > 0 or tensor.numel() == 0:  # a dimension shorter than the ranks leaves some with nothing
            chunks[name] = Chunk(local.detach(), offsets.get(name, (0,) * tensor.ndim))
    return chunks


def _offsets(sharded: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Where in the whole tensors this rank's shards begin, as torch's own plan of a checkpoint has it."""
    if not sharded:
        return {}
    from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

    items = create_default_local_save_plan(dict(sharded), is_coordinator=False).items
    return {item.index.fqn: tuple(item.tensor_data.chunk.offsets) for item in items if item.tensor_data is not None}


def write_shard(path: Path, chunks: Mapping[str, Chunk], alive: Callable[[], None] | None = None) -> FileFacts:
    """Write the chunks as one safetensors file and wait until it is on the disk.

    Args:
        path: a new file.
        chunks: on any device; those in host memory are written without a copy.
        alive: called now and then, when more is on the disk.

    Raises:
        OSError: the disk is full, or the folder cannot be written to.
        TypeError: a type that safetensors does not know.
    """
    # The larger types first, as safetensors itself does, so that every tensor is aligned to its type.
    names = sorted(chunks, key=lambda name: (-chunks[name].local.element_size(), name))
    digest, size, unsynced = xxhash.xxh3_128(), 0, 0
    with open_regular(path, "xb", buffering=_BUFFER_BYTES) as file:
        contents: Iterator[Any] = (_content(chunks[name].local) for name in names)
        for content in chain([_header(chunks, names)], contents):
            for begin in range(0, len(content), _SYNCED_BYTES):
                piece = content[begin : begin + _SYNCED_BYTES]
                digest.update(piece)
                size += file.write(piece)
                unsynced += len(piece)
                if unsynced >= _SYNCED_BYTES:  # or all of it would be waited for at the end, without a sign of life
                    file.flush()
                    os.fdatasync(file.fileno())
                    unsynced = 0
                if alive is not None:
                    alive()
        file.flush()
        os.fsync(file.fileno())
    return FileFacts(size, digest.hexdigest())


class HostCopies:
    """Host memory for the chunks of one save, kept for the next."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Host memory held."""
        return sum(map(_num_bytes, self._buffers.values()))

    def take(self, chunks: Mapping[str, Chunk], *, from_host: bool = True) -> dict[str, Chunk]:
        """Copy the chunks; the copies are valid until the next call, and what was copied may change.

        From a GPU all copies are queued to pinned memory, and waited for once.

        Args:
            chunks: on any device.
            from_host: copy those in host memory too; else the result has them as they are.
        """
        copied = {name: chunk for name, chunk in chunks.items() if from_host or chunk.local.is_cuda}
        copies: dict[str, Chunk] = {}
        for name, chunk in copied.items():
            copies[name] = Chunk(self._buffer(name, chunk.local), chunk.offsets)
            copies[name].local.copy_(chunk.local, non_blocking=True)
        self._buffers = {name: chunk.local for name, chunk in copies.items()}
        for device in {chunk.local.device for chunk in copied.values() if chunk.local.is_cuda}:
            finish_copies(device)
        return {**chunks, **copies}

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        kept = self._buffers.get(name)
        if kept is not None and kept.shape == like.shape and kept.dtype == like.dtype:
            return kept
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)


def _content(tensor: Tensor) -> memoryview:
    """A tensor's bytes; from a GPU they come when it is their turn."""
    flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(cast(Any, flat))


def _header(chunks: Mapping[str, Chunk], names: list[str]) -> bytes:
    """Length and JSON, padded: https://github.com/huggingface/safetensors#format."""
    entries: dict[str, object] = {
        "__metadata__": {
            "DCP_SHARDING_INFO": json.dumps({name: {"saved_offsets": chunks[name].offsets} for name in names}),
            "DCP_VERSION": "1.0",
            "format": "pt",
        }
    }
    begin = 0
    for name in names:
        local = chunks[name].local
        if local.dtype not in DTYPES:
            raise TypeError(f"{name} is {local.dtype}, which a safetensors file cannot hold")
        end = begin + _num_bytes(local)
        entries[name] = {"dtype": DTYPES[local.dtype], "shape": list(local.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def _is_writer(tensor: "DTensor", index: int) -> bool:
    """Whether this rank writes its shard: of the ranks that hold the same one, they take turns."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    assert not any(placement.is_partial() for placement in tensor.placements), "state is never partial"
    return all(
        coordinate[dim] == index % tensor.device_mesh.size(dim)
        for dim, placement in enumerate(tensor.placements)
        if placement.is_replicate()
    )


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
