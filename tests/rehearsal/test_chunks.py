"""Lazily computed chunks for ranks equal the chunks of torch."""

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

from foundry.rehearsal.fake_cuda import _Chunks


@pytest.mark.parametrize(("rows", "ranks"), [(8, 4), (10, 4), (3, 8), (9, 8), (1, 1), (0, 2)])
@pytest.mark.parametrize("dim", [0, 1])
def test_lazy_chunks_equal_torch_chunks(rows, ranks, dim):
    shape = (rows, 3) if dim == 0 else (3, rows)
    tensor = torch.arange(rows * 3.0).view(shape)
    expected = _chunk_with_empty(tensor, ranks, dim)
    chunks = _Chunks(tensor, ranks, dim)
    for rank in range(ranks):
        assert chunks[rank].shape == expected[rank].shape
        assert torch.equal(chunks[rank], expected[rank])
