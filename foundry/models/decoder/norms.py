"""Root-mean-square norms of hidden states, queries and keys."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundry.core.sharded import local_part
from foundry.models.tensor_parallel import replicated_weight


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
        if x.device.type != "cuda":
            return F.rms_norm(x, weight.shape, weight, self.eps)
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
