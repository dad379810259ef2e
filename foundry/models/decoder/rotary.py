"""Rotary positions (Su et al., 2021)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rotary_table(seq_len: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of rotary positions, (seq_len, head_dim) float32 each (Su et al., 2021).

    Angles repeat for both halves of a head, as in transformers. Both are computed in each forward pass, which costs
    little. A buffer would be rounded by `.to(torch.bfloat16)` and left empty by initialization on the meta device.
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    positions = torch.arange(seq_len, device=device, dtype=torch.float32)
    angles = positions[:, None] / theta**exponents
    return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to x: (batch, heads, seq, head_dim); cos, sin: (..., seq, head_dim)."""
    if not torch.is_grad_enabled():
        return _turn(x, cos, sin)
    rotated: Tensor = _Rotation.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return rotated


class _Rotation(torch.autograd.Function):
    """Rotation whose gradient is the inverse rotation; the operations of the definition would move twice the memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x * cos + cat(-second, first) * sin, with the halves of x and the same rounding."""
    half = x.shape[-1] // 2
    sin, turned = sin[..., :half], x * cos
    turned[..., :half].sub_(x[..., half:] * sin)
    turned[..., half:].add_(x[..., :half] * sin)
    return turned
