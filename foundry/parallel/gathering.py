"""Exchange of Python values between ranks that accepts data only and never executes received code."""

import io
import pickle
import sys
from dataclasses import is_dataclass
from pathlib import PosixPath, WindowsPath
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from foundry.parallel.process_group import World

_T = TypeVar("_T")
_PLAIN = {(kind.__module__, kind.__name__): kind for kind in (set, frozenset, PosixPath, WindowsPath)} | {
    ("pathlib", kind.__name__): kind for kind in (PosixPath, WindowsPath)
}


def gather(value: _T, world: World, group: ProcessGroup | None = None) -> list[_T]:
    """Return the values of all ranks on every rank, in rank order; all ranks must call this together.

    `torch.distributed.all_gather_object` would execute any code sent by a process that poses as a rank.

    Args:
        value: plain containers, numbers, strings, paths and foundry's dataclasses.
        world: the ranks.
        group: process group to use, with tensors in host memory; None for the default group.

    Raises:
        pickle.UnpicklingError: a rank has sent a value of any other type.
    """
    if world.world_size == 1:
        return [value]
    buffer = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world.world_size)]
    dist.all_gather(sizes, torch.tensor([len(buffer)]), group=group)
    longest = int(max(sizes))
    parts = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(parts, torch.nn.functional.pad(buffer, (0, longest - len(buffer))), group=group)
    return [loads(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]


def broadcast(value: _T, world: World, group: ProcessGroup | None = None) -> _T:
    """Return rank 0's value on every rank; all ranks must call this together.

    Args:
        value: as for `gather`; ignored on other ranks than 0.
        world: the ranks.
        group: process group to use, with tensors in host memory; None for the default group.

    Raises:
        pickle.UnpicklingError: rank 0 has sent a value of any other type.
    """
    if world.world_size == 1:
        return value
    content = bytearray(pickle.dumps(value)) if world.is_main else bytearray()
    size = torch.tensor([len(content)])
    dist.broadcast(size, 0, group=group)
    data = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, 0, group=group)
    received: _T = loads(data.numpy().tobytes())
    return received


def loads(data: bytes) -> Any:
    """Unpickle a value made of plain containers, numbers, strings, paths and foundry's dataclasses.

    Raises:
        pickle.UnpicklingError: the pickle refers to any other type.
    """
    return _Unpickler(io.BytesIO(data)).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return only data types, and only from loaded modules, because importing a module would execute it."""
        result: type | None = _PLAIN.get((module, name))
        if result is None and module.startswith("foundry."):
            candidate = vars(sys.modules.get(module, object)).get(name)
            result = candidate if isinstance(candidate, type) and is_dataclass(candidate) else None
        if result is None:
            raise pickle.UnpicklingError(f"a rank has sent {module}.{name}, which is not a data type")
        return result
