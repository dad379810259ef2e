"""Learned embeddings that are added to the values of attention."""

import torch
from torch import Tensor, nn

from foundry.models.compute_dtype import to_compute_dtype
from foundry.models.tensor_parallel import replicated_weight


class ValueEmbedding(nn.Module):
    """Learned values of each token for the attention of one layer, times a learned factor that starts at 0.

    Args:
        vocab_size: number of tokens.
        width: size of a layer's values, kv heads * head_dim.
    """

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        # Not drawn here, so that the random numbers of other parts do not depend on this option.
        empty = torch.empty(vocab_size, width)
        self.table: nn.Embedding = nn.Embedding.from_pretrained(empty, freeze=False)  # type: ignore[no-untyped-call]
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return (batch, seq, width) values for tokens: (batch, seq) int64.

        Under tensor parallelism, the width is that of the heads of this rank.
        """
        return to_compute_dtype(replicated_weight(self.scale, self.table.weight) * self.table(tokens))
