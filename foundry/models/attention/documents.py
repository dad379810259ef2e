"""Attention and positions for packed rows, whose documents must not attend to each other."""

from functools import cached_property

import torch
from torch import Tensor

from foundry.models.attention.kernel import attend
from foundry.models.attention.varlen import DocumentBounds, has_kernel


class Documents:
    """Document layout of packed rows. Positions restart at 0 in each document.

    Args:
        documents: (batch, seq) int64, index of each token's document in the microbatch; -1 for padding.
        bounds: bounds of the same documents; consecutive padding tokens count as a document. None makes GPUs attend
            with a mask.

    Attributes:
        positions: (batch, seq) int64, position of each token in its document.
    """

    def __init__(self, documents: Tensor, bounds: DocumentBounds | None = None) -> None:
        self._documents, self._bounds = documents, bounds
        columns = torch.arange(documents.shape[1], device=documents.device)
        is_first = torch.ones_like(documents, dtype=torch.bool)
        is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
        self.positions = columns - torch.where(is_first, columns, 0).cummax(1).values

    @cached_property
    def mask(self) -> Tensor:
        """Attention mask, (batch, 1, seq, seq) bool: causal, within a document. True lets a query attend to a key."""
        is_same = self._documents[:, :, None] == self._documents[:, None, :]
        return is_same.tril().unsqueeze(1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute causal attention within each document; all tensors are (batch, heads, seq, head_dim).

        GPUs use the variable-length kernel if there are bounds and it supports the dtype and head size, else a mask.
        CPUs process one document after the other: for a row of 16 documents this takes a ninth of the time of attention
        with a mask.
        """
        if self._bounds is not None and has_kernel(query.device, query.dtype, query.shape[-1]):
            return self._bounds.attend(query, key, value)
        if query.device.type != "cpu":
            return attend(query, key, value, mask=self.mask)
        rows = []
        for row, lengths in enumerate(self._lengths):
            parts = [torch.split(tensor[row : row + 1], lengths, dim=2) for tensor in (query, key, value)]
            output = [attend(q, k, v, is_causal=True) for q, k, v in zip(*parts, strict=True)]
            rows.append(torch.cat(output, dim=2))
        return torch.cat(rows)

    @cached_property
    def _lengths(self) -> list[list[int]]:
        """Token counts of the documents in each row."""
        return [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in self._documents]


def knows_documents(model: torch.nn.Module) -> bool:
    """Return the model's attribute `isolates_documents`, by default False; this check runs no forward pass."""
    return bool(getattr(model, "isolates_documents", False))


@torch.no_grad()
def isolates_documents(model: torch.nn.Module) -> bool:
    """Return True if packing documents into one row leaves the outputs of each document unchanged.

    Runs the model on a small row of two documents. The second document must give the same outputs as in a row of its
    own, up to a tolerance of 1e-3, and bitwise the same outputs if the first document is changed. This second check is
    exact because freshly initialized weights would leak only little between documents. A model whose attribute
    `isolates_documents` is True is not run.
    """
    if knows_documents(model):
        return True
    device = next(model.parameters()).device
    first, second = torch.tensor([[0, 1, 1]], device=device), torch.tensor([[1, 0, 0, 1, 1]], device=device)
    documents = torch.tensor([[0] * first.shape[1] + [1] * second.shape[1]], device=device)

    def read(prefix: Tensor) -> Tensor:
        row = torch.cat([prefix, second], dim=1)
        log_probs: Tensor = model(row, row, documents=documents).log_prob
        return log_probs[:, first.shape[1] :]

    was_training = model.training
    model.eval()
    try:
        packed, other, alone = read(first), read(1 - first), model(second, second).log_prob
    except TypeError:  # forward() takes no `documents`
        return False
    finally:
        model.train(was_training)
    return torch.equal(packed, other) and torch.allclose(packed, alone, rtol=1e-3, atol=1e-3)
