"""The decoder without its head: embedding, blocks and norm."""

from collections.abc import Mapping

from torch import Tensor, nn

from foundry.models.attention.branches import Branches
from foundry.models.attention.documents import Documents
from foundry.models.attention.varlen import DocumentBounds
from foundry.models.compute_dtype import to_compute_dtype
from foundry.models.decoder.attention import AttentionContext
from foundry.models.decoder.norms import RMSNorm
from foundry.models.decoder.value_embedding import ValueEmbedding
from foundry.models.dropout import KeyedDropout
from foundry.models.kv_cache import KVCache


class Decoder(nn.Module):
    """The decoder without its head.

    Args:
        embed_tokens: token embedding.
        layers: blocks.
        norm: norm of the hidden states.
        value_embeddings: value embeddings by the index of their layer.
        residual_scalars: the blocks have residual scalars, and take the input of the first block as an argument.
    """

    def __init__(
        self,
        embed_tokens: nn.Embedding,
        layers: nn.ModuleList,
        norm: RMSNorm,
        *,
        value_embeddings: Mapping[int, ValueEmbedding] | None = None,
        residual_scalars: bool = False,
    ) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = layers
        self.norm = norm
        self.value_embeddings = nn.ModuleDict({str(layer): part for layer, part in (value_embeddings or {}).items()})
        self.residual_scalars = residual_scalars

    def forward(
        self,
        tokens: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: KVCache | None = None,
        draws: KeyedDropout | None = None,
        documents: Documents | Branches | None = None,
    ) -> Tensor:
        """Map tokens: (batch, seq) int64 to hidden states (batch, seq, hidden_size); cos, sin: (..., seq, head_dim)."""
        x = to_compute_dtype(self.embed_tokens(tokens))
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        mask: Tensor | DocumentBounds | None = None
        if cache is not None:
            seq_len = tokens.shape[1]
            bounds = cache.bounds(seq_len, x.device, x.dtype, head_dim=cos.shape[-1])
            mask = cache.mask(seq_len, x.device) if bounds is None else bounds
        embedded = x
        for index, layer in enumerate(self.layers):
            options = self.block_options(embedded)
            if str(index) in self.value_embeddings:
                options["token_values"] = self.value_embeddings[str(index)](tokens)
            context = AttentionContext(
                cache=None if cache is None else cache.layers[index],
                mask=mask,
                draws=None if draws is None else draws.fold(index),
                documents=documents,
            )
            x = layer(x, cos, sin, context, **options)
        normed: Tensor = self.norm(x)
        return normed

    def block_options(self, embedded: Tensor) -> dict[str, Tensor]:
        """Return keyword arguments of every block, given the input of the first block, (batch, seq, hidden_size)."""
        return {"embedded": embedded} if self.residual_scalars else {}
