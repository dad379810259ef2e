"""Floating-point operations of training."""

from collections.abc import Iterable

from torch import Tensor


def matmul_flops(weights: Iterable[Tensor]) -> int:
    """Return the FLOPs of a forward and backward pass of one input vector through products with these weights.

    A weight costs 2 FLOPs in the forward pass, 2 for the gradient of the input and 2 for the gradient of the weight;
    the last 2 are not counted if the weight is frozen.
    """
    return sum((6 if weight.requires_grad else 4) * weight.numel() for weight in weights)
