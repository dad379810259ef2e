"""Replacement of torch's kernel for variable-length attention, for tests on CPUs."""

from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from foundry.models import kv_cache
from foundry.models.attention import branches, documents


def attend_by_starts(
    query, key, value, starts, starts_of_keys, longest, longest_of_keys, *, window_size, enable_gqa=False
):
    """Compute `varlen_attn` as documented by torch, one document at a time; tensors are (tokens, heads, head_dim).

    As in FlashAttention, the queries are the last positions of a document that has more keys than queries.
    """
    assert starts.dtype == starts_of_keys.dtype == torch.int32
    assert window_size == (-1, 0)
    assert enable_gqa == (query.shape[1] != key.shape[1])
    of_queries, of_keys = starts.tolist(), starts_of_keys.tolist()
    assert of_queries[0] == of_keys[0] == 0
    assert of_queries[-1] == len(query)
    assert of_keys[-1] == len(key) == len(value)
    assert max(end - start for start, end in pairwise(of_queries)) <= longest
    assert max(end - start for start, end in pairwise(of_keys)) <= longest_of_keys
    parts = []
    for (start, end), (first, last) in zip(pairwise(of_queries), pairwise(of_keys), strict=True):
        assert last - first >= end - start >= 0
        q, k, v = (
            tensor[begin:stop].transpose(0, 1)
            for tensor, begin, stop in ((query, start, end), (key, first, last), (value, first, last))
        )
        mask = torch.ones(end - start, last - first, dtype=torch.bool).tril(last - first - (end - start))
        parts.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=enable_gqa).transpose(0, 1))
    return torch.cat(parts)


@contextmanager
def kernel_on_cpu():
    """Replace torch's varlen kernel by `attend_by_starts` in the body; yield the query shapes of its calls."""
    calls = []

    def count(*args, **options):
        calls.append(args[0].shape)
        return attend_by_starts(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.attention, "varlen", SimpleNamespace(varlen_attn=count), raising=False)
        for module in (branches, documents, kv_cache):
            patch.setattr(module, "has_kernel", lambda *kind: True)
        yield calls
