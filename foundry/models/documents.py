"""Rows that hold several documents, of which none sees another."""

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from foundry.models.varlen import DocumentBounds, has_kernel


class Documents:
    """Which tokens of packed rows belong together; each document has positions of its own.

    Args:
        documents: (batch, seq) int64, the number of each token's document in the microbatch; -1 for padding.
        bounds: of the same documents, runs of padding among them; None: a GPU attends with a mask.

    Attributes:
        positions: (batch, seq) int64, of each token in its document.
    """

    def __init__(self, documents: Tensor, bounds: DocumentBounds | None = None) -> None:
        self._documents, self._bounds = documents, bounds
        columns = torch.arange(documents.shape[1], device=documents.device)
        is_first = torch.ones_like(documents, dtype=torch.bool)
        is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
        self.positions = columns - torch.where(is_first, columns, 0).cummax(1).values

    @cached_property
    def mask(self) -> Tensor:
        """(batch, 1, seq, seq) bool, which tokens attend to which: causal, within a document."""
        is_same = self._documents[:, :, None] == self._documents[:, None, :]
        return is_same.tril().unsqueeze(1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, grouped: bool) -> Tensor:
        """Causal attention within each document; (batch, heads, seq, head_dim) each.

        With bounds a kernel that knows them, on GPUs and for types that have it. On a CPU one document after the other:
        in a row of 16 documents that takes a ninth of the time of a mask.
        """
        if self._bounds is not None and has_kernel(query.device, query.dtype, query.shape[-1]):
            return self._bounds.attend(query, key, value)
        if query.device.type != "cpu":
            return F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask, enable_gqa=grouped)
        rows = []
        for row, lengths in enumerate(self._lengths):
            parts = [torch.split(tensor[row : row + 1], lengths, dim=2) for tensor in (query, key, value)]
            attended = [
                F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
                for q, k, v in zip(*parts, strict=True)
            ]
            rows.append(torch.cat(attended, dim=2))
        return torch.cat(rows)

    @cached_property
    def _lengths(self) -> list[list[int]]:
        """Tokens of each document of each row."""
        return [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in self._documents]


def knows_documents(model: torch.nn.Module) -> bool:
    """Whether a model says of itself that it separates documents, so that it needs no weights to be asked."""
    return bool(getattr(model, "isolates_documents", False))


@torch.no_grad()
def isolates_documents(model: torch.nn.Module) -> bool:
    """Whether a document in a row with another is as it is alone, and the same whatever the other says.

    The latter is asked to the last bit: a model with fresh weights would mix them by little. A model that has the
    attribute `isolates_documents` is not asked.
    """
    if knows_documents(model):
        return True
    device = next(model.parameters()).device
    first, second = torch.tensor([[0, 1, 1]], device=device), torch.tensor([[1, 0, 0, 1, 1]], device=device)
    documents = torch.tensor([[0] * first.shape[1] + [1] * second.shape[1]], device=device)

    def read(before: Tensor) -> Tensor:
        row = torch.cat([before, second], dim=1)
        found: Tensor = model(row, row, documents=documents).log_prob
        return found[:, first.shape[1] :]

    was_training = model.training
    model.eval()
    try:
        packed, other, alone = read(first), read(1 - first), model(second, second).log_prob
    except TypeError:  # it takes no positions
        return False
    finally:
        model.train(was_training)
    return torch.equal(packed, other) and torch.allclose(packed, alone, rtol=1e-3, atol=1e-3)
