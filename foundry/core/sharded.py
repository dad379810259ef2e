"""Checks for sharded and fake tensors and sharded modules, without importing the modules that define them.

Importing DTensor and FSDP2 takes half as long as importing torch itself. A process that has created a DTensor has
imported its module, so if the module has not been imported, there are no DTensors.
"""

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def is_sharded(value: object) -> "TypeGuard[DTensor]":
    """Return whether a value is a DTensor."""
    kind: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, which shares its memory; a tensor that is not sharded is its own part."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def sharded_modules(model: nn.Module) -> "list[FSDPModule]":
    """Return the modules that `fully_shard` was applied to, outer before inner."""
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if kind is None else [unit for unit in model.modules() if isinstance(unit, kind)]


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor is a fake tensor of `FakeTensorMode`, which has a shape and a type but no data."""
    kind: Any = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", None)
    return kind is not None and isinstance(tensor, kind)
