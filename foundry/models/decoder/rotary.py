"""Rotary positions (Su et al., 2021)."""

import torch
from torch import Tensor


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
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
