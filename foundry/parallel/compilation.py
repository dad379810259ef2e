"""Compilation of a model's blocks with torch.compile."""

import os
import shutil
from collections.abc import Iterable

import torch
from torch import nn

from foundry.core.errors import ConfigError, Violation

_COMPILERS = {"cpu": ("C++", "CXX", ("g++",)), "cuda": ("C", "CC", ("gcc", "clang"))}
"""By device type: programming language, environment variable of the compiler, and default commands."""


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compile each block in place; blocks of the same class share compiled graphs.

    Args:
        blocks: from `find_blocks`; their callers and parameter names do not change.
    """
    import torch._dynamo  # as long to import as torch itself

    # Of a block within DistributedDataParallel it would make several graphs, at the borders of DDP's buckets. These
    # hold the gradients of several blocks, so that nothing more is overlapped.
    torch._dynamo.config.optimize_ddp = False
    for block in blocks:
        block.compile()


def count_graphs() -> int:
    """Return the number of graphs compiled by this process, including recompilations for other shapes or dtypes."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def require_compiler(device: torch.device) -> None:
    """Refuse to compile on a machine without the compiler that torch.compile needs on a device.

    On a CPU that is Inductor's, on a GPU the one with which Triton builds the launchers of its kernels.

    Raises:
        ConfigError: it is not there.
    """
    if device.type not in _COMPILERS:
        return
    language, variable, defaults = _COMPILERS[device.type]
    value = os.environ.get(variable)
    commands = (value.split()[0],) if value and value.strip() else defaults
    if not any(shutil.which(command) for command in commands):
        compiler = f"{language} compiler {' or '.join(commands)}"
        message = f"is true but there is no {compiler} on this machine; install it, or set hparams.torchcompile=false"
        raise ConfigError(Violation("hparams.torchcompile", message))
