"""Telling tensors and modules that are sharded from whole ones, at no cost where nothing is.

Importing DTensor and FSDP2 takes half as long as importing torch itself. Whoever has made one has imported its module,
so a process that has not has none.
"""

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def is_sharded(value: object) -> "TypeGuard[DTensor]":
    """Whether it is a DTensor."""
    kind: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, which is all of one that is not sharded; it shares the tensor's memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def sharded_modules(model: nn.Module) -> "list[FSDPModule]":
    """The modules that `fully_shard` was applied to, outer before inner."""
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if kind is None else [unit for unit in model.modules() if isinstance(unit, kind)]


def is_fake(tensor: Tensor) -> bool:
    """Whether it is one of `FakeTensorMode`'s, which have shapes and types and no numbers."""
    kind: Any = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", None)
    return kind is not None and isinstance(tensor, kind)
