"""Compiling a model's blocks with torch.compile."""

import os
import shutil
from collections.abc import Iterable

import torch
from torch import nn


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compile each block in place, before or after it is wrapped; blocks of one kind share their graphs.

    Args:
        blocks: from `find_blocks`; what calls them and the names of their parameters stay what they are.
    """
    import torch._dynamo  # as long to import as torch itself

    # Of a block within DistributedDataParallel it would make several graphs, at the borders of DDP's buckets. These
    # hold the gradients of several blocks, so that nothing more is overlapped.
    torch._dynamo.config.optimize_ddp = False
    for block in blocks:
        block.compile()


def uncompile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Have blocks compute as before `compile_blocks`."""
    for block in blocks:
        block._compiled_call_impl = None  # what `compile()` sets, and `Module.__call__` asks for


def count_graphs() -> int:
    """Graphs that this process has compiled so far; those of another shape or type than before count again."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def missing_compiler(device: torch.device) -> str | None:
    """The command that torch.compile would generate code with on a CPU, where it cannot be found; else None."""
    command = os.environ.get("CXX") or "g++"
    return command if device.type == "cpu" and shutil.which(command) is None else None
