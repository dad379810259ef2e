"""Checks for sharded and fake tensors and sharded modules, without importing the modules that define them.

Importing DTensor and FSDP2 takes half as long as importing torch itself. A process that has created a DTensor has
imported its module, so if the module has not been imported, there are no DTensors.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
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


def reduced_placements(tensor: "DTensor", shape: Sequence[int]) -> tuple[Any, ...]:
    """Return the placements of a tensor that has, in each dimension, the size of `tensor` or 1.

    Dimensions of size 1 are replicated; the others keep the sharding of `tensor`.
    """
    from torch.distributed.tensor import Replicate

    return tuple(
        Replicate() if (dim := getattr(placement, "dim", None)) is not None and shape[dim] == 1 else placement
        for placement in tensor.placements
    )


def reduced_zeros(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros of a shape that has, in each dimension, the size of `tensor` or 1; a DTensor if `tensor` is one."""
    local = local_part(tensor)
    sizes = [1 if size == 1 else own for size, own in zip(shape, local.shape, strict=True)]
    zeros = local.new_zeros(sizes, dtype=dtype)
    if not is_sharded(tensor):
        return zeros
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    whole = torch.empty(tuple(shape), device="meta")
    meta = TensorMeta(whole.shape, whole.stride(), dtype)
    spec = DTensorSpec(tensor.device_mesh, reduced_placements(tensor, shape), tensor_meta=meta)
    # Not `DTensor.from_local`, which moves a part on the CPU to the device of the mesh.
    return DTensor(zeros, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def sharded_modules(model: nn.Module) -> "list[FSDPModule]":
    """Return the modules that `fully_shard` was applied to, outer before inner."""
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if kind is None else [unit for unit in model.modules() if isinstance(unit, kind)]


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor is a fake tensor of `FakeTensorMode`, which has a shape and a type but no data."""
    kind: Any = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", None)
    return kind is not None and isinstance(tensor, kind)
