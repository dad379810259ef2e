"""Number of operations of a Muon step; updating many matrices at once gives the same weights as one at a time."""

from unittest.mock import patch

import pytest
import torch
from support.devices import DEVICES, Operations
from torch import nn

from foundry.optim import muon

NO_KERNELS = {"view", "_unsafe_view", "alias", "permute", "transpose", "split_with_sizes", "slice", "empty"}


def muon_kernels(shape, num_matrices, ns_steps):
    """Return the number of tensor operations that compute or copy in the second step of Muon."""
    matrices = [nn.Parameter(torch.ones(shape)) for _ in range(num_matrices)]
    options = {"momentum": 0.9, "nesterov": True, "ns_steps": ns_steps, "weight_decay": 0.1}
    optimizer = muon.Muon(matrices, lr=1.0, ns_dtype=torch.bfloat16, **options)
    optimizer.found_inf = torch.zeros(())
    for matrix in matrices:
        matrix.grad = torch.ones(shape)
    optimizer.step()
    with Operations() as operations:
        optimizer.step()
    aten = [name.removeprefix("aten::") for name in operations.names if name.startswith("aten::")]
    return sum(name.split(".")[0] not in NO_KERNELS for name in aten)


@pytest.mark.parametrize(("shape", "num_others"), [((8, 20), 3), ((20, 8), 4)])
def test_muon_batches_momentum_and_weight_updates_over_matrices(shape, num_others):
    """Each matrix adds three products per iteration, three operations to normalize and, if tall, a transposed copy."""
    few, many, longer = (muon_kernels(shape, *sizes) for sizes in ((4, 5), (24, 5), (24, 7)))
    assert many - few == 20 * (3 * 5 + num_others)
    assert longer - many == 24 * 3 * 2
    assert few - 4 * (3 * 5 + num_others) < 20


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (8, 8)])
def test_stack_of_matrices_is_orthogonalised_like_each_matrix(shape):
    """A GPU orthogonalizes matrices of equal shape as a stack."""
    stack = torch.randn(5, *shape)
    expected = torch.stack([muon.orthogonalise(matrix, 5, torch.float32) for matrix in stack])
    torch.testing.assert_close(muon.orthogonalise(stack, 5, torch.float32), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_update_of_many_shapes_equals_that_of_single_matrices(device):
    """Matrices of one shape are not neighbours, and two groups have other numbers of iterations."""
    shapes = [(8, 20), (20, 8), (8, 20), (8, 8), (8, 20), (20, 8)]
    start = [torch.randn(shape) for shape in shapes]
    gradients = [torch.randn(shape) for shape in shapes]

    def update(indices, where):
        matrices = {index: nn.Parameter(start[index].to(where, copy=True)) for index in indices}
        groups = [{"params": [m for i, m in matrices.items() if i % 2 == odd], "ns_steps": 5 + odd} for odd in (0, 1)]
        options = {"momentum": 0.9, "nesterov": True, "ns_steps": 5, "weight_decay": 0.1, "ns_dtype": torch.float32}
        optimizer = muon.Muon([group for group in groups if group["params"]], lr=0.1, **options)
        for index, matrix in matrices.items():
            matrix.grad = gradients[index].to(where)
        optimizer.step()
        return {index: matrix.detach().cpu() for index, matrix in matrices.items()}

    together = update(range(len(shapes)), device)
    for index in range(len(shapes)):
        torch.testing.assert_close(together[index], update([index], "cpu")[index], rtol=1e-4, atol=1e-5)


def test_muon_update_in_chunks_equals_one_update():
    """Several groups, dtypes and shapes; chunks of up to three matrices give the same weights as single matrices."""
    held = []
    for chunk_bytes in (2**26, 700):
        torch.manual_seed(0)
        shapes = [(8, 20), (20, 8), (8, 8), (3, 20), (8, 20), (8, 20)]
        matrices = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        matrices[4] = nn.Parameter(torch.randn(8, 20, dtype=torch.bfloat16))
        groups = [{"params": matrices[:3]}, {"params": matrices[3:], "lr": 0.5, "weight_decay": 0.0, "momentum": 0.5}]
        options = {"momentum": 0.9, "nesterov": True, "ns_steps": 5, "weight_decay": 0.1, "ns_dtype": torch.float32}
        optimizer = muon.Muon(groups, lr=0.1, **options)
        with patch.object(muon, "_HOST_CHUNK_BYTES", chunk_bytes):
            for _ in range(3):
                for matrix in matrices:
                    matrix.grad = torch.randn_like(matrix)
                optimizer.step()
        held.append(matrices)
    for one, other in zip(*held, strict=True):
        assert torch.equal(one, other)
