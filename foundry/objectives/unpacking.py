"""Packed rows: keyword arguments for the model, and per-document views of token values."""

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from foundry.core.protocols import Microbatch
from foundry.models.attention.branches import Branches
from foundry.models.attention.varlen import DocumentBounds


def document_keywords(model: nn.Module, microbatch: Microbatch) -> dict[str, Any]:
    """Return the keyword arguments that make a model separate the documents of packed rows, or share their prefixes.

    The result is empty if rows are not packed.

    Args:
        model: wrapped or not; `document_bounds` is included if the model's forward() takes it.
        microbatch: microbatch whose `documents`, if any, may have further dimensions before (rows, seq).
    """
    if "documents" not in microbatch:
        return {}
    if "branches" in microbatch:
        device = microbatch["documents"].device
        return {"branches": Branches(microbatch["prefix_lengths"], microbatch["branches"], device)}
    keywords: dict[str, Any] = {"documents": microbatch["documents"].flatten(0, -2)}
    kind: Any = type(model.module if isinstance(model, DistributedDataParallel) else model)
    if "document_starts" in microbatch and _accepts_bounds(kind):
        longest = int(microbatch["longest_document"])  # in host memory, so this does not synchronize with the device
        keywords["document_bounds"] = DocumentBounds(microbatch["document_starts"], longest)
    return keywords


@cache
def _accepts_bounds(kind: Any) -> bool:
    return "document_bounds" in inspect.signature(kind.forward).parameters


def unpack(
    values: Tensor, microbatch: Microbatch, *, parts: int = 1, width: int | None = None, fill: float = 0
) -> Tensor:
    """Unpack rows to one row per document, so that a sum over a row is the sum over a document.

    This is done with a gather, because a scatter-add on a GPU would add values in a different order each time.

    Args:
        values: (rows, seq), values of the microbatch's tokens.
        microbatch: if it has no `documents`, each row is a document, and `values` is returned unchanged.
        parts: documents per sample.
        width: length of the longest document in tokens, or an upper bound; None uses the row length.
        fill: value after the last token of a document.

    Returns:
        (samples x parts, width), the values of each document, starting at its first token.
    """
    if "documents" not in microbatch:
        return values
    documents = microbatch["documents"].view_as(values)
    count, width, device = parts * len(microbatch["position"]), width or values.shape[1], values.device
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    flat = documents.flatten()
    # Each document writes its start once; all other tokens write to one extra entry that is not read.
    to = torch.where(is_first.flatten() & (flat >= 0), flat, count)
    places = torch.arange(flat.numel(), device=device)
    starts = torch.zeros(count + 1, dtype=torch.int64, device=device).scatter_(0, to, places)
    index = starts[:count, None] + torch.arange(width, device=device)
    safe_index = index.clamp(max=flat.numel() - 1)
    is_token = (index == safe_index) & (flat[safe_index] == torch.arange(count, device=device)[:, None])
    return values.flatten()[safe_index].masked_fill(~is_token, fill)
