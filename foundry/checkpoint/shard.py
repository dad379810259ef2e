"""Writing of one rank's safetensors file of a checkpoint: selection of tensors, copies in host memory, file format.

The format is safetensors with the offsets of torch.distributed.checkpoint in the header, as written by
`HuggingFaceStorageWriter` with `save_distributed` and read by `HuggingFaceStorageReader`. That writer gathers the plans
of all ranks on one rank and builds the file in memory twice while it holds the GIL. Here each rank derives its share
from sizes and sharding of the tensors, which are written to disk without a copy and hashed on the way.
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
"""Dtypes that safetensors can store, with their names in its format."""

_BUFFER_BYTES, _ALIGNMENT_BYTES = 2**20, 8
_SYNCED_BYTES = 2**30


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor.

    Attributes:
        local: the part that this rank holds.
        offsets: position of the part's first element in the whole tensor, one number per dimension.
    """

    local: Tensor
    offsets: tuple[int, ...]


def own_chunks(tensors: Mapping[str, Tensor], *, rank: int, world_size: int) -> dict[str, Chunk]:
    """Return the chunks that this rank writes: its shards, and its share of the tensors that several ranks hold.

    All ranks compute the same assignment, without communication.

    Args:
        tensors: tensors with the same names on every rank; DTensors may be sharded in any way, other tensors are equal
            on all ranks.
        rank: rank of this process.
        world_size: number of ranks.
    """
    loads = [0] * world_size
    local_tensors: dict[str, Tensor] = {}
    largest_first = sorted(tensors, key=lambda name: (-_num_bytes(tensors[name]), name))
    for index, name in enumerate(largest_first):
        tensor = tensors[name]
        if is_sharded(tensor):
            if _is_writer(tensor, index):
                local_tensors[name] = tensor
            continue
        writer = loads.index(min(loads))
        loads[writer] += _num_bytes(tensor)
        if writer == rank:
            local_tensors[name] = tensor
    return local_chunks(local_tensors)


def local_chunks(tensors: Mapping[str, Tensor]) -> dict[str, Chunk]:
    """Return this rank's chunk of each tensor, sharded or whole; omit tensors whose elements are all on other ranks."""
    chunks: dict[str, Chunk] = {}
    offsets = _offsets({name: tensor for name, tensor in tensors.items() if is_sharded(tensor)})
    for name, tensor in tensors.items():
        local = local_part(tensor)
        if local.numel() > 0 or tensor.numel() == 0:  # a shard is empty if there are more ranks than rows
            chunks[name] = Chunk(local.detach(), offsets.get(name, (0,) * tensor.ndim))
    return chunks


def _offsets(sharded: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the offsets of this rank's shards in the whole tensors, computed by torch's own checkpoint planner."""
    if not sharded:
        return {}
    from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

    items = create_default_local_save_plan(dict(sharded), is_coordinator=False).items
    return {item.index.fqn: tuple(item.tensor_data.chunk.offsets) for item in items if item.tensor_data is not None}


def write_shard(path: Path, chunks: Mapping[str, Chunk], alive: Callable[[], None] | None = None) -> FileFacts:
    """Write chunks as one safetensors file and wait until it is on disk.

    Args:
        path: path of the new file, which must not exist.
        chunks: chunks on any device; those in host memory are written without a copy.
        alive: heartbeat, called after each piece of at most 1 GiB.

    Raises:
        OSError: if the disk is full or the folder is not writable.
        TypeError: if safetensors does not support a dtype.
    """
    # Sort by item size, largest first, as safetensors does, so that every tensor is aligned to its dtype.
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
                if unsynced >= _SYNCED_BYTES:  # otherwise the last fsync waits for the whole file
                    file.flush()
                    os.fdatasync(file.fileno())
                    unsynced = 0
                if alive is not None:
                    alive()
        file.flush()
        os.fsync(file.fileno())
    return FileFacts(size, digest.hexdigest())


class HostCopies:
    """Host memory for the chunks of one save, reused by the next save."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Size of the allocated host memory."""
        return sum(map(_num_bytes, self._buffers.values()))

    def take(self, chunks: Mapping[str, Chunk], *, from_host: bool = True) -> dict[str, Chunk]:
        """Copy chunks to host memory.

        The originals may change afterwards, and the copies are valid until the next call.

        Copies from a GPU to pinned memory are all queued first, and then waited for once per GPU.

        Args:
            chunks: chunks on any device.
            from_host: also copy chunks that are in host memory; if False, they are returned as they are.
        """
        chunks_to_copy = {name: chunk for name, chunk in chunks.items() if from_host or chunk.local.is_cuda}
        copies: dict[str, Chunk] = {}
        for name, chunk in chunks_to_copy.items():
            copies[name] = Chunk(self._buffer(name, chunk.local), chunk.offsets)
            copies[name].local.copy_(chunk.local, non_blocking=True)
        self._buffers = {name: chunk.local for name, chunk in copies.items()}
        for device in {chunk.local.device for chunk in chunks_to_copy.values() if chunk.local.is_cuda}:
            finish_copies(device)
        return {**chunks, **copies}

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is not None and buffer.shape == like.shape and buffer.dtype == like.dtype:
            return buffer
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)


def _content(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor; a tensor on a GPU is copied to host memory now."""
    flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(cast(Any, flat))


def _header(chunks: Mapping[str, Chunk], names: list[str]) -> bytes:
    """Return a file's header, which is a length and padded JSON: https://github.com/huggingface/safetensors#format."""
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
            raise TypeError(f"{name} is {local.dtype}, which a .safetensors file cannot store")
        end = begin + _num_bytes(local)
        entries[name] = {"dtype": DTYPES[local.dtype], "shape": list(local.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def _is_writer(tensor: "DTensor", index: int) -> bool:
    """Return whether this rank writes its shard of a tensor; of the ranks with the same shard, `index` selects one."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    assert not any(placement.is_partial() for placement in tensor.placements), "state must not be partial"
    return all(
        coordinate[dim] == index % tensor.device_mesh.size(dim)
        for dim, placement in enumerate(tensor.placements)
        if placement.is_replicate()
    )


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
