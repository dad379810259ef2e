"""Causal self-attention."""

from dataclasses import dataclass

from torch import Tensor, nn

from foundry.models.attention.branches import Branches
from foundry.models.attention.documents import Documents
from foundry.models.attention.kernel import attend
from foundry.models.attention.varlen import DocumentBounds
from foundry.models.decoder.norms import HeadNorm
from foundry.models.decoder.rotary import rotate
from foundry.models.dropout import KeyedDropout, attend_with_dropout
from foundry.models.kv_cache import LayerCache


@dataclass(frozen=True)
class AttentionContext:
    """Keys that a query may attend to, and dropout; by default causal attention within each row, without dropout.

    Attributes:
        cache: keys and values of the preceding tokens; attention appends the new tokens to it.
        mask: (batch or 1, 1, queries, keys) bool, true where a query may attend to a key; or document bounds, for
            causal attention within documents, with as many keys as queries. None for causal attention, or for attention
            to all keys if there are fewer queries than keys.
        draws: dropout masks of this layer; None disables dropout.
        documents: layout of packed rows, or of a row whose sequences share prefixes.
    """

    cache: LayerCache | None = None
    mask: Tensor | DocumentBounds | None = None
    draws: KeyedDropout | None = None
    documents: Documents | Branches | None = None


CAUSAL = AttentionContext()
"""Causal attention within each row, without dropout."""


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped-query heads."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        dropout: float = 0.0,
        *,
        qk_norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.head_dim = hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.q_norm = None if qk_norm_eps is None else HeadNorm(self.head_dim, qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else HeadNorm(self.head_dim, qk_norm_eps)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        context: AttentionContext = CAUSAL,
        *,
        token_values: Tensor | None = None,
    ) -> Tensor:
        """Attend within x: (batch, seq, hidden_size) and to cached keys and values; cos, sin: (..., seq, head_dim).

        `token_values` is the argument of `project`.
        """
        query, key, value = self.project(x, cos, sin, token_values)
        if context.cache is not None:
            key, value = context.cache.append(key, value)
            if (heads_output := context.cache.attend_shared(query, key, value)) is not None:
                return self._project_output(heads_output)
        return self.attend(query, key, value, context)

    def project(
        self, x: Tensor, cos: Tensor, sin: Tensor, token_values: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project x to rotated queries and keys, and values; (batch, heads or kv heads, seq, head_dim) each.

        `token_values`, (batch, seq, kv heads * head_dim), are added to the values; under tensor parallelism both cover
        the heads of this rank.
        """
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:  # their kernel would copy transposed heads
            query, key = self.q_norm(query, self.q_proj.weight), self.k_norm(key, self.k_proj.weight)
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
        if token_values is not None:
            value = value + token_values.view(*token_values.shape[:2], -1, self.head_dim).transpose(1, 2)
        return rotate(query, cos, sin), rotate(key, cos, sin), value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext) -> Tensor:
        """Compute the attention output, (batch, queries, hidden_size), of tensors returned by `project`.

        Args:
            query: (batch, heads, queries, head_dim).
            key: (batch, kv heads, keys, head_dim).
            value: as `key`.
            context: mask, documents and dropout of the attention weights; the tokens of its cache must be in `key`.
        """
        mask, draws, documents = context.mask, context.draws, context.documents
        is_causal = mask is None and query.shape[2] == key.shape[2]  # a single query without mask attends to all keys
        if isinstance(mask, DocumentBounds):
            heads_output = mask.attend(query, key, value)
        elif draws is not None and self.dropout > 0:
            assert not isinstance(documents, Branches)
            heads_output = attend_with_dropout(
                query, key, value, mask if documents is None else documents.mask, self.dropout, draws
            )
        elif documents is not None:
            heads_output = documents.attend(query, key, value)
        else:
            heads_output = attend(query, key, value, mask=mask, is_causal=is_causal)
        return self._project_output(heads_output)

    def _project_output(self, heads_output: Tensor) -> Tensor:
        output: Tensor = self.o_proj(heads_output.transpose(1, 2).flatten(-2))
        return output
