"""Weights gathered for a while, so that each rank calls the model as often as it likes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from foundry.core.sharded import sharded_modules
from foundry.parallel.device import free_memory
from foundry.parallel.process_group import World


@contextmanager
def gathered(model: nn.Module) -> Iterator[nn.Module]:
    """The model with all of its weights on every rank; forward passes in the body communicate nothing.

    Under tensor parallelism it is those of a rank's part, and ranks that share their samples call the model together.

    Every rank enters together, and needs memory for the whole model in the type that it is gathered in. The weights
    must not change in the body.

    Args:
        model: as it is called in training.
    """
    model = cast(nn.Module, model.module) if isinstance(model, DistributedDataParallel) else model
    units = sharded_modules(model)
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield model
    finally:
        for unit in units:
            unit.reshard()
            # As `FSDPSync` leaves it outside of a window.
            unit.set_reshard_after_forward(True, recurse=False)


@contextmanager
def gathered_if_they_fit(model: nn.Module, world: World) -> Iterator[nn.Module]:
    """`gathered` if no rank lacks memory for it; else the model as it is, whose forward passes gather layer by layer.

    Every rank enters together, and all of them call the model equally often.

    Args:
        model: as it is called in training.
        world: the ranks.
    """
    inner = cast(nn.Module, model.module) if isinstance(model, DistributedDataParallel) else model
    if sharded_modules(inner):
        lacks_memory = torch.tensor(float(not _fit(inner, world)), device=world.device)
        if world.all_reduce_sum(lacks_memory) > 0:
            yield inner
            return
    with gathered(inner) as whole:
        yield whole


def _fit(model: nn.Module, world: World) -> bool:
    """Whether this rank has memory for all weights, and as much again for what is computed with them."""
    needed = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return 2 * needed <= free_memory(world.device, world.local_world_size)
