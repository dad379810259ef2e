"""Muon orthogonalizes whole matrices: sharding does not change the updates."""

from itertools import product
from unittest.mock import patch

import pytest
import torch
from support.harness import run_ranks
from support.toy import FP32, Toy, backward_window, full_tensor, largest_difference, whole_parameters

from foundry.config.schemas.distributed import DDP, FSDP, HSDP, Distributed

pytestmark = pytest.mark.distributed

LAYOUTS = {"fsdp": FSDP(), "hsdp": HSDP(), "ddp": DDP(), "ddp_sharded_optimizer": DDP(shard_optimizer=True)}
STEPS = 4


def train(config, world, num_microbatches):
    """Return whole weights and momentum after a few steps, and the largest change of the matrices with momentum."""
    from foundry.optim.optimizers import muon
    from foundry.parallel.process_group import arrange
    from foundry.parallel.wrap import parallelize

    parallel = parallelize(Toy(), FP32, arrange(world, config), grad_checkpointing=False, torchcompile=False)
    before = whole_parameters(parallel)
    options = {"momentum": 0.95, "nesterov": True, "ns_steps": 5, "beta1": 0.9, "beta2": 0.95, "eps": 1e-3}
    options["precision"] = FP32.mode
    optimizers = muon(model=parallel.model, lr=1e-2, weight_decay=0.1, **options)
    for step in range(STEPS):
        backward_window(parallel, FP32, world, step, num_microbatches)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = optimizers[0].state
    momentum = {
        name: full_tensor(state[p]["momentum_buffer"]) for name, p in parallel.inner.named_parameters() if p in state
    }
    after = whole_parameters(parallel)
    return after, momentum, largest_difference({n: after[n] for n in momentum}, {n: before[n] for n in momentum})


def compare(world):
    from foundry.parallel.process_group import World

    weights, momentum, moved = train(Distributed(), World.single(torch.device("cpu")), 2)
    results = {}
    for name, config in LAYOUTS.items():
        other = train(config, world, 1)
        results[name] = largest_difference(other[0], weights), largest_difference(other[1], momentum)
    return len(momentum), moved, results


def test_muon_updates_on_two_ranks_match_one_process():
    for num_matrices, moved, results in run_ranks(compare, 2):
        assert num_matrices == 3 * 4
        assert moved > 1e-2
        for name, (weights, momentum) in results.items():
            assert weights < 1e-5, (name, weights)
            assert momentum < 1e-5, (name, momentum)


SHAPES = [(12, 12), (5, 16), (16, 5), (7, 3), (1, 9), (9, 1)]  # Some ranks hold no part of the small matrices.
LAYOUTS_OF_MATRICES = {
    1: [((1,), ("rows",))],
    2: [((2,), ("rows",)), ((2,), ("columns",)), ((2,), ("plain",))],
    4: [((4,), ("rows",)), ((2, 2), ("whole", "rows")), ((2, 2), ("columns", "rows"))],
}


NORMALIZED = {"cautious_weight_decay": True, "row_variance_decay": 0.9}


def steps_of_both(mesh, placements, ns_dtype, held_in, **own):
    """Return pairs of a whole and a sharded tensor, first weights, then states, after the same gradients."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from foundry.optim.muon import Muon

    generator = torch.Generator().manual_seed(0)
    draws = [[torch.randn(shape, generator=generator).to(held_in) for shape in SHAPES] for _ in range(STEPS + 1)]
    is_plain = placements == ("plain",)  # Plain tensors, as under DDP.
    kinds = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate(), "plain": Replicate()}
    layout = [kinds[kind] for kind in placements]
    options = {"lr": 0.1, "momentum": 0.95, "nesterov": True, "ns_steps": 5, "weight_decay": 0.1, "ns_dtype": ns_dtype}
    options |= own
    held = []
    shard = torch.clone if is_plain else lambda matrix: distribute_tensor(matrix, mesh, layout)
    for place, group in ((torch.clone, None), (shard, mesh.get_group() if is_plain else None)):
        matrices = [torch.nn.Parameter(place(matrix)) for matrix in draws[0]]
        optimizer = Muon(matrices, **options, group=group)
        for gradients in draws[1:]:
            for matrix, gradient in zip(matrices, gradients, strict=True):
                matrix.grad = place(gradient)
            optimizer.step()
        states = [optimizer.state[matrix][key] for key in optimizer.state[matrices[0]] for matrix in matrices]
        held.append([full_tensor(tensor.detach()) for tensor in (*matrices, *states)])
    return list(zip(*held, strict=True))


def different_tensors(world):
    """Return, by layout and dtypes, the shapes of tensors that are not equal bit for bit."""
    from torch.distributed.device_mesh import init_device_mesh

    from foundry.optim import owners

    types = (torch.float32, torch.bfloat16)
    found = {}
    for mesh_shape, placements in LAYOUTS_OF_MATRICES[world.world_size]:
        mesh = init_device_mesh("cpu", mesh_shape)
        for ns_dtype, held_in, own in product(types, types, ({}, NORMALIZED)):
            with patch.object(owners, "_BATCH_BYTES", 600):  # A low limit, so that the matrices form several batches.
                pairs = steps_of_both(mesh, placements, ns_dtype, held_in, **own)
            assert len(pairs) == (3 if own else 2) * len(SHAPES)
            assert all(torch.isfinite(one).all() for one, _ in pairs)
            wrong = [tuple(one.shape) for one, other in pairs if not torch.equal(one, other)]
            found[mesh_shape, placements, ns_dtype, held_in, *own] = wrong
    return found


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_sharded_muon_matches_whole_matrices_bit_for_bit(num_ranks):
    for found in run_ranks(different_tensors, num_ranks):
        assert not any(found.values()), found


def after_tensor_parallel(world):
    """Return a matrix after a step under tensor parallelism and FSDP2, and the same part of an unsharded one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    from foundry.optim.muon import Muon

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    layer, gradient = torch.nn.Linear(6, 16, bias=False), torch.randn(16, 6)
    alone = torch.nn.Parameter(layer.weight.detach().clone())
    alone.grad = gradient
    fully_shard(parallelize_module(layer, mesh["tensor"], ColwiseParallel()), mesh=mesh["shard"])
    row, column = mesh.get_coordinate()
    matrix = layer.weight
    local = gradient.chunk(2)[column].chunk(2)[row]
    matrix.grad = DTensor.from_local(local, matrix.device_mesh, matrix.placements, shape=(16, 6), stride=(6, 1))
    options = {"lr": 0.1, "momentum": 0.95, "nesterov": True, "ns_steps": 5, "weight_decay": 0.1}
    for each in (alone, matrix):
        Muon([each], **options, ns_dtype=torch.float32).step()
    return matrix.to_local(), alone.detach().chunk(2)[column].chunk(2)[row]


@pytest.mark.long
def test_muon_update_of_a_matrix_sharded_twice_is_exact():
    for sharded, whole_matrix in run_ranks(after_tensor_parallel, 4):
        assert torch.equal(sharded, whole_matrix)


COUNTED = [(64, 64)] * 4 + [(64, 172)] * 4 + [(172, 64)] * 2 + [(16, 64)] * 4


def received_and_computed(world, mesh_shape):
    """Return the bytes that this rank receives in a step, and the FLOPs that it computes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    from foundry.optim.muon import Muon

    class Received(TorchDispatchMode):
        num_bytes = 0

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if "c10d" in operator.namespace:
                assert operator.name() == "c10d::alltoall_base_"
                self.num_bytes += args[0].numel() * args[0].element_size()
            return operator(*args, **(kwargs or {}))

    mesh = init_device_mesh("cpu", mesh_shape)
    layout = [Shard(0)] if mesh.ndim == 1 else [Replicate(), Shard(0)]
    matrices = [torch.nn.Parameter(distribute_tensor(torch.ones(shape), mesh, layout)) for shape in COUNTED]
    for matrix in matrices:
        matrix.grad = torch.ones_like(matrix)
    options = {"lr": 0.1, "momentum": 0.95, "nesterov": True, "ns_steps": 5, "weight_decay": 0.1}
    with Received() as received, FlopCounterMode(display=False) as flops:
        Muon(matrices, **options, ns_dtype=torch.bfloat16).step()
    return received.num_bytes, flops.get_total_flops()


@pytest.mark.parametrize(("mesh_shape", "num_copies"), [((4,), 1), pytest.param((2, 2), 2, marks=pytest.mark.long)])
def test_muon_work_and_traffic_are_divided_among_ranks(mesh_shape, num_copies):
    """Each update is gathered in bf16 on one rank and sent back; no rank gathers or computes everything."""
    ranks = run_ranks(received_and_computed, 4, mesh_shape)
    numel = sum(rows * columns for rows, columns in COUNTED)
    flops = sum(5 * (4 * min(s) ** 2 * max(s) + 2 * min(s) ** 3) for s in COUNTED)
    received_bytes = 2 * numel * (1 + num_copies)
    assert sum(received for received, _ in ranks) == received_bytes
    assert sum(computed for _, computed in ranks) == flops
    assert max(computed for _, computed in ranks) < 1.2 * flops / 4
    assert max(received for received, _ in ranks) < 1.2 * received_bytes / 4
