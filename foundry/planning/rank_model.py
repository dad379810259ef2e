"""Copies of fake models as a rank holds them: stored types, and its part under tensor parallelism."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from foundry.config.schemas.precision import PrecisionMode
from foundry.models.lora import frozen_matrices
from foundry.parallel.precision import PrecisionPolicy
from foundry.parallel.tensor_parallel import divided_dims, is_divisible


def model_of_rank(
    model: nn.Module, policy: PrecisionPolicy, *, narrow_frozen: bool = False, num_parts: int = 1
) -> nn.Module:
    """Return a copy of a fake model as one of `num_parts` tensor-parallel ranks holds it.

    It has the types of a model after `PrecisionPolicy.prepare`.
    """
    is_cast = policy.mode is PrecisionMode.pure_bf16
    narrow_tensors: set[Tensor] = {*frozen_matrices(model)} if narrow_frozen and policy.is_amp else set()

    def dtype_of(tensor: Tensor) -> torch.dtype:
        if tensor in narrow_tensors:
            return policy.compute_dtype
        return torch.bfloat16 if is_cast and tensor.is_floating_point() else tensor.dtype

    dims = divided_dims(model) if is_divisible(model, num_parts) else {}
    return copy_in_dtypes(model, dtype_of, {parameter: (dim, num_parts) for parameter, dim in dims.items()})


def copy_in_dtypes(
    model: nn.Module,
    dtype_of: Callable[[Tensor], torch.dtype],
    divisions: Mapping[Tensor, tuple[int, int]] | None = None,
) -> nn.Module:
    """Return a copy of a fake model in other types; `Module.to` cannot change fake tensors in place.

    `divisions` maps a parameter to a dimension and a number of parts: the copy has only the first of these parts.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        dim, num_parts = (divisions or {}).get(parameter, (0, 1))
        full = parameter.detach()
        part = full.narrow(dim, 0, full.shape[dim] // num_parts) if num_parts > 1 else full
        data = part.to(dtype_of(parameter), copy=True)
        memo[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to(dtype_of(buffer), copy=True)
    copied: nn.Module = copy.deepcopy(model, memo)
    return copied
