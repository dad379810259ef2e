"""The repeating block: attention and feed-forward layer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundry.models.branches import Branches
from foundry.models.decoder.attention import Attention
from foundry.models.decoder.norms import RMSNorm
from foundry.models.documents import Documents
from foundry.models.dropout import KeyedDropout
from foundry.models.fsdp_block import FSDPBlock
from foundry.models.kv_cache import LayerCache
from foundry.models.varlen import DocumentBounds


class FeedForward(nn.Module):
    """SwiGLU feed-forward layer (Shazeer, 2020)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position of x: (batch, seq, hidden_size)."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class TransformerBlock(FSDPBlock):
    """Pre-norm transformer block: attention and feed-forward layers with residual connections."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_heads: int,
        num_kv_heads: int,
        norm_eps: float,
        hidden_dropout: float = 0.0,
        attention_dropout: float = 0.0,
        *,
        qk_norm: bool = False,
        residual_scalars: bool = False,
    ) -> None:
        super().__init__()
        self.dropout = hidden_dropout
        self.self_attn = Attention(
            hidden_size, num_heads, num_kv_heads, attention_dropout, qk_norm_eps=norm_eps if qk_norm else None
        )
        self.mlp = FeedForward(hidden_size, intermediate_size)
        self.input_layernorm = RMSNorm(hidden_size, norm_eps)
        self.post_attention_layernorm = RMSNorm(hidden_size, norm_eps)
        self.residual_scale = nn.Parameter(torch.ones(())) if residual_scalars else None
        self.embedding_scale = nn.Parameter(torch.zeros(())) if residual_scalars else None

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache | None = None,
        mask: Tensor | DocumentBounds | None = None,
        draws: KeyedDropout | None = None,
        documents: Documents | Branches | None = None,
        *,
        embedded: Tensor | None = None,
        token_values: Tensor | None = None,
    ) -> Tensor:
        """Map x: (batch, seq, hidden_size) to the same shape; cos, sin: (..., seq, head_dim).

        `embedded` is the argument of `rescale`, and `token_values` that of `Attention.project`.
        """
        x = self.rescale(x, embedded)
        normed = self.input_layernorm(x)
        attended = self.self_attn(normed, cos, sin, cache, mask, draws, documents, token_values=token_values)
        return self.add(x, attended, draws)

    def rescale(self, x: Tensor, embedded: Tensor | None) -> Tensor:
        """Return residual_scale * x + embedding_scale * embedded; a block without these scalars returns x.

        Args:
            x: residual stream, (batch, seq, hidden_size).
            embedded: input of the first block, of the same shape; None if the block has no scalars.
        """
        if self.residual_scale is None or self.embedding_scale is None:
            return x
        assert embedded is not None
        # Rounded to the dtype of x on all devices: GPUs would round them, and CPUs would not.
        return self.residual_scale.to(x.dtype) * x + self.embedding_scale.to(x.dtype) * embedded

    def add(self, x: Tensor, attended: Tensor, draws: KeyedDropout | None = None) -> Tensor:
        """Add the attention output to the residual stream x, then the feed-forward output."""
        x = x + self._drop(attended, draws, 0)
        output: Tensor = x + self._drop(self.mlp(self.post_attention_layernorm(x)), draws, 1)
        return output

    def _drop(self, x: Tensor, draws: KeyedDropout | None, place: int) -> Tensor:
        return x if draws is None or self.dropout == 0 else draws.fold(place).hidden(x, self.dropout)
