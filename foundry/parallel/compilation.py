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
    import torch._dynamo  # takes as long to import as torch itself

    # DDPOptimizer would split a block into several graphs at the boundaries of DDP's buckets. A bucket holds the
    # gradients of several blocks, so the split would not increase the overlap.
    torch._dynamo.config.optimize_ddp = False
    for block in blocks:
        block.compile()


def count_graphs() -> int:
    """Return the number of graphs compiled by this process, including recompilations for other shapes or dtypes."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def missing_compiler(device: torch.device) -> str | None:
    """Return the compiler that torch.compile needs on a device but this machine lacks, such as "C++ compiler g++".

    Inductor needs a compiler on a CPU; on a GPU, Triton needs one for its kernel launchers. None if a compiler is
    found, or for other device types.
    """
    if device.type not in _COMPILERS:
        return None
    language, variable, usual = _COMPILERS[device.type]
    chosen = os.environ.get(variable)
    commands = (chosen.split()[0],) if chosen and chosen.strip() else usual
    if any(shutil.which(command) for command in commands):
        return None
    return f"{language} compiler {' or '.join(commands)}"


def require_compiler(device: torch.device) -> None:
    """Check that this machine can compile for a device.

    Raises:
        ConfigError: the compiler is missing, see `missing_compiler`.
    """
    if (compiler := missing_compiler(device)) is not None:
        message = f"is true but there is no {compiler} on this machine; install it, or set hparams.torchcompile=false"
        raise ConfigError(Violation("hparams.torchcompile", message))
