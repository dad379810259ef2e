"""Weights gathered for a while, so that each rank calls the model as often as it likes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from foundry.training.sharded import sharded_modules


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
