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
        blocks: from `find_blocks`; callers call them as before, and parameter names do not change.
    """
    import torch._dynamo  # this import takes as long as that of torch itself

    # With `optimize_ddp`, a block within DistributedDataParallel would be split into several graphs at the borders of
    # DDP's buckets. A bucket holds the gradients of several blocks, so the split would not add any overlap.
    torch._dynamo.config.optimize_ddp = False
    for block in blocks:
        block.compile()


def count_graphs() -> int:
    """Return the number of graphs compiled by this process, including recompilations for other shapes or dtypes."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def require_compiler(device: torch.device) -> None:
    """Check that this machine has the compiler that torch.compile needs for a device.

    For a CPU, Inductor needs a C++ compiler; for a GPU, Triton needs a C compiler for the launchers of its kernels.

    Raises:
        ConfigError: this machine does not have the compiler.
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
