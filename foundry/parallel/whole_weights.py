"""Context managers that gather all weights of a model, so that forward passes do not gather them layer by layer."""

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
    """Gather all weights of a model on every rank; forward passes inside the context do not gather weights.

    With tensor parallelism each rank gathers only its tensor-parallel part, and the ranks of a tensor-parallel group
    must call the model together, because the forward pass communicates within the group.

    All ranks must enter the context together, and each needs memory for all weights in the dtype of the gathered
    copies. The weights must not change inside the context.

    Args:
        model: the model as called in training.
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
            # True is the setting that `FSDPSync` leaves outside a window.
            unit.set_reshard_after_forward(True, recurse=False)


@contextmanager
def gathered_if_they_fit(model: nn.Module, world: World) -> Iterator[nn.Module]:
    """Gather all weights if every rank has enough memory; otherwise yield the model, which gathers layer by layer.

    All ranks must enter the context together and call the model equally often.

    Args:
        model: the model as called in training.
        world: the ranks.
    """
    inner = cast(nn.Module, model.module) if isinstance(model, DistributedDataParallel) else model
    if sharded_modules(inner):
        lacks_memory = torch.tensor(float(not _fits_in_memory(inner, world)), device=world.device)
        if world.all_reduce_sum(lacks_memory) > 0:
            yield inner
            return
    with gathered(inner) as full_model:
        yield full_model


def _fits_in_memory(model: nn.Module, world: World) -> bool:
    """Return whether this rank has memory for all weights, plus the same amount for activations."""
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return 2 * num_bytes <= free_memory(world.device, world.local_world_size)
