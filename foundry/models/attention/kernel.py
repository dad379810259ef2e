"""Scaled dot-product attention, with a faster gradient for short bf16 sequences on CPUs."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from foundry.core.planned_device import planned_device

_MOST_KEYS = 512
"""Maximum number of keys; with more, the gradient of torch takes as long or less."""
_PART_ELEMENTS = 2**18
"""Number of attention weights that are computed at a time, 1 MiB in float32, which the cache of a core holds."""
_CAUSAL_QUERIES = 128
"""Number of consecutive queries that are differentiated together, without the keys that follow them."""


def attend(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """Compute `torch.nn.functional.scaled_dot_product_attention`; the outputs are the same bits.

    The gradient of bf16 on a CPU with at most 512 keys is computed from whole matrices of attention weights, and rounds
    no more than the kernel of torch. That kernel divides a short sequence into many small matrix products, whose
    preparation takes longer than their arithmetic (`benchmarks/attention.py`).

    Args:
        query: (batch, heads, queries, head_dim).
        key: (batch, kv heads, keys, head_dim); `heads` must be a multiple of `kv heads`.
        value: as `key`.
        mask: (batch or 1, 1, queries, keys) bool, true where a query may attend to a key; None for no mask.
        is_causal: a query attends to keys up to its own position; there are as many keys as queries, and no mask.

    Returns:
        (batch, heads, queries, head_dim).
    """
    if _has_own_gradient(query, key, value):
        output: Tensor = _ShortAttention.apply(query, key, value, mask, is_causal)  # type: ignore[no-untyped-call]
        return output
    is_grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal, enable_gqa=is_grouped)


def _has_own_gradient(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether `_ShortAttention` supports the tensors; torch's kernel needs tokens and contiguous heads too."""
    return (
        not torch.compiler.is_compiling()  # first: the graph must not be divided at `planned_device`
        and (planned_device() or query.device.type) == "cpu"
        and query.dtype == key.dtype == value.dtype == torch.bfloat16
        and query.shape[2] > 0
        and 0 < key.shape[2] <= _MOST_KEYS
        and all(tensor.stride(-1) == 1 for tensor in (query, key, value))
        and torch.is_grad_enabled()
        and (query.requires_grad or key.requires_grad or value.requires_grad)
    )


class _ShortAttention(torch.autograd.Function):
    """Attention by torch's kernel, with the gradient of FlashAttention (Dao et al., 2022, arXiv:2205.14135)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        keys, values = (tensor.repeat_interleave(groups, 1) if groups > 1 else tensor for tensor in (key, value))
        bias = None if mask is None else torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -math.inf)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        output, log_sums = kernel(query, keys, values, 0.0, is_causal, attn_mask=bias)
        ctx.save_for_backward(query, key, value, mask, output, log_sums)
        ctx.is_causal = is_causal
        return output  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, output, log_sums = ctx.saved_tensors
        grad_query = torch.empty_like(query)
        grad_key, grad_value = torch.zeros(2, *key.shape, device=key.device)
        with _bf16_products():
            for of_queries, of_keys in _parts(query, key, ctx.is_causal):
                q, g, o, sums = (tensor[of_queries] for tensor in (query, grad, output, log_sums))
                some_mask = mask if mask is None or len(mask) == 1 else mask[of_queries[0]]
                first = of_queries[2].start if ctx.is_causal else None
                parts = _differentiate(q, g, o, sums, key[of_keys], value[of_keys], some_mask, first)
                grad_query[of_queries] = parts[0]
                grad_key[of_keys] += parts[1]
                grad_value[of_keys] += parts[2]
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


_Place = tuple[slice, slice, slice]
"""Rows, heads and tokens."""


def _parts(query: Tensor, key: Tensor, is_causal: bool) -> Iterator[tuple[_Place, _Place]]:
    """Yield parts of the queries, and the keys that they attend to, that are differentiated together."""
    (batch, heads, num_queries, _), (_, kv_heads, num_keys, _) = query.shape, key.shape
    groups = heads // kv_heads
    block = min(num_queries, _CAUSAL_QUERIES) if is_causal else num_queries
    size = max(1, _PART_ELEMENTS // (groups * block * num_keys))
    num_rows, num_heads = max(1, size // kv_heads), min(size, kv_heads)
    for row in range(0, batch, num_rows):
        rows = slice(row, row + num_rows)
        for head in range(0, kv_heads, num_heads):
            of_queries, of_keys = slice(head * groups, (head + num_heads) * groups), slice(head, head + num_heads)
            for first in range(0, num_queries, block):
                queries = slice(first, first + block)
                yield (rows, of_queries, queries), (rows, of_keys, slice(queries.stop if is_causal else num_keys))


def _differentiate(
    query: Tensor,
    grad: Tensor,
    output: Tensor,
    log_sums: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    first: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values in float32, of the same shapes.

    Causal attention passes `first`, the position of the first query.
    """
    scale = query.shape[-1] ** -0.5
    by_query = (*query.shape[:-1], key.shape[2])
    k, v = (_to_float(tensor).flatten(0, 1) for tensor in (key, value))
    # The queries of a key head are consecutive rows of one matrix.
    q, g, o = (_to_float(tensor).view(len(k), -1, query.shape[-1]) for tensor in (query, grad, output))
    means = o.mul_(g).sum(-1).view(log_sums.shape)  # of the gradients of the attention weights
    weights, scores = torch.bmm(q, k.mT), torch.bmm(g, v.mT)
    weights.view(by_query).mul_(scale).sub_(log_sums.unsqueeze(-1)).exp_()
    if first is not None:
        weights.view(by_query).tril_(first)
    if mask is not None:
        weights.view(by_query).masked_fill_(~mask, 0.0)
    scores.view(by_query).sub_(means.unsqueeze(-1))
    scores *= weights
    grad_q, grad_k, grad_v = torch.bmm(scores, k), torch.bmm(scores.mT, q), torch.bmm(weights.mT, g)
    grad_q *= scale
    grad_k *= scale
    return grad_q.view(query.shape), grad_k.view(key.shape), grad_v.view(key.shape)


def _to_float(tensor: Tensor) -> Tensor:
    """Copy to a contiguous float32 tensor."""
    return torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device).copy_(tensor)


@contextmanager
def _bf16_products() -> Iterator[None]:
    """Let oneDNN round the inputs of float32 matrix products to bf16, if the CPU has instructions for it.

    Queries, keys, values and the gradient are bf16 numbers. The kernel of torch rounds the other inputs too.
    """
    products = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    previous = products.fp32_precision
    products.fp32_precision = "bf16"
    try:
        yield
    finally:
        products.fp32_precision = previous
