"""Root-mean-square norms of hidden states, queries and keys."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from foundry.core.planned_device import planned_device
from foundry.core.sharded import local_part
from foundry.models.tensor_parallel import replicated_weight

_TILE_ELEMENTS = 2**18
"""Number of elements that a CPU normalizes at a time, 1 MiB in float32, which its cache holds.

For smaller tiles two threads take longer than one operation on all rows.
"""


class RMSNorm(nn.Module):
    """Root-mean-square normalization (Zhang and Sennrich, 2019), computed in fp32; the output has the input's dtype."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x: (..., hidden_size) over its last dimension."""
        return self.normalize(x, local_part(self.weight))

    def normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalize x: (..., hidden_size) over its last dimension with the whole weight, (hidden_size,)."""
        # An fp32 weight would promote the residual stream to fp32. With FSDP2 the weight is bf16 already.
        weight = weight.to(x.dtype)
        if x.device.type == "cpu" and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            normed: Tensor = _TiledNorm.apply(x, weight, self.eps)  # type: ignore[no-untyped-call]
            return normed
        # Since torch 2.12, autocast on CUDA casts the inputs to fp32 and the output back, which the kernel does itself.
        with torch.autocast("cuda", enabled=False):
            return F.rms_norm(x, weight.shape, weight, self.eps)


class HeadNorm(RMSNorm):
    """`RMSNorm` of each head's queries or keys (QK-norm: Henry et al., 2020, arXiv:2010.04245; as in Qwen3)."""

    def forward(self, x: Tensor, projection: Tensor) -> Tensor:  # type: ignore[override]
        """Normalize x: (batch, seq, heads, head_dim), the output of a matrix.

        Under tensor parallelism each rank has the matrix of some heads, and the gradient of the norm's weight is
        summed over the ranks of the matrix.
        """
        return self.normalize(x, replicated_weight(self.weight, projection))


class _TiledNorm(torch.autograd.Function):
    """`torch.nn.functional.rms_norm` over the last dimension, in tiles of rows that fit into the cache of a CPU.

    The outputs are the same bits. Like the kernel of a GPU, it saves its input and a number per row, while the
    operations that torch uses on a CPU save several tensors in fp32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        rows = x.reshape(-1, x.shape[-1])
        normed, scales = torch.empty_like(rows), rows.new_empty(len(rows), 1, dtype=exact)
        for tile in _tiles(rows):
            wide = rows[tile].to(exact)
            scale = scales[tile] = (wide * wide).mean(-1, keepdim=True).add_(eps).rsqrt_()
            normed[tile] = (wide * scale).mul_(weight)
        ctx.save_for_backward(x, weight, scales)
        return normed.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scales = ctx.saved_tensors
        rows, grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, x.shape[-1])
        grad_rows, wide_weight = torch.empty_like(rows), weight.to(scales.dtype)
        grad_weight = torch.zeros_like(wide_weight)
        for tile in _tiles(rows):
            direction, wide_grad = rows[tile].to(scales.dtype) * scales[tile], grads[tile].to(scales.dtype)
            products = wide_grad * direction
            grad_weight += products.sum(0)
            along = (products @ wide_weight / rows.shape[1]).unsqueeze(1)  # part of the gradient along the direction
            grad_rows[tile] = (wide_grad * wide_weight).addcmul_(direction, along, value=-1).mul_(scales[tile])
        return grad_rows.view(x.shape), grad_weight.to(weight.dtype), None


def _tiles(rows: Tensor) -> Iterator[slice]:
    """Divide rows, (rows, columns), into tiles; only the first tile if a run is planned, since all are alike."""
    size = max(1, _TILE_ELEMENTS // rows.shape[1])
    starts = range(0, len(rows), size)
    return (slice(start, start + size) for start in (starts if planned_device() is None else starts[:1]))
