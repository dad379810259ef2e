"""Floating-point operations of training."""

from collections.abc import Iterable

from torch import Tensor


def matmul_flops(weights: Iterable[Tensor]) -> int:
    """FLOPs of a forward and backward pass through matrix products, for each vector that is multiplied.

    2 a weight forward, 2 for the gradient of its input and 2 for its own, which a frozen one has not.
    """
    return sum((6 if weight.requires_grad else 4) * weight.numel() for weight in weights)
