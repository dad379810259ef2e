"""Root-mean-square norms as the kernel of a CUDA build of torch computes them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def norms_on_cuda(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a `rms_norm` that allocates and saves the tensors of CUDA's kernel for CUDA tensors, which are fake.

    The kernel saves its input and a number per row. A build of torch without CUDA replaces it by operations that save
    several tensors in float32.

    Args:
        original: torch's function, which is still used for tensors on the CPU.
    """

    def norm(
        input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        if input.device.type != "cuda":
            return original(input, normalized_shape, weight, eps)
        output: Tensor = _Norm.apply(input, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
        return output

    return norm


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, num_dims: int) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-num_dims], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None
