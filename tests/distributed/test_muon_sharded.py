"""Muon orthogonalises whole matrices: sharding them changes no update."""

from itertools import product

import pytest
import torch
from harness import spawn
from toy import FP32, Toy, backward_window, largest_difference, whole, whole_parameters

from foundry.config.schemas.distributed import DDP, FSDP, HSDP, Distributed

pytestmark = pytest.mark.distributed

LAYOUTS = {"fsdp": FSDP(), "hsdp": HSDP(), "ddp": DDP(), "ddp_sharded_optimizer": DDP(shard_optimizer=True)}
STEPS = 4


def train(config, world, num_microbatches):
    """Whole weights and momentum after a few steps, and how far the matrices inside the blocks moved."""
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
    momentum = {name: whole(state[p]["momentum_buffer"]) for name, p in parallel.inner.named_parameters() if p in state}
    after = whole_parameters(parallel)
    return after, momentum, largest_difference({n: after[n] for n in momentum}, {n: before[n] for n in momentum})


def compare(world):
    from foundry.parallel.process_group import World

    weights, momentum, moved = train(Distributed(), World(0, 0, 1, 1, torch.device("cpu")), 2)
    results = {}
    for name, config in LAYOUTS.items():
        other = train(config, world, 1)
        results[name] = largest_difference(other[0], weights), largest_difference(other[1], momentum)
    return len(momentum), moved, results


def test_updates_are_those_of_one_process():
    for num_matrices, moved, results in spawn(compare, 2):
        assert num_matrices == 3 * 4
        assert moved > 1e-2
        for name, (weights, momentum) in results.items():
            assert weights < 1e-5, (name, weights)
            assert momentum < 1e-5, (name, momentum)


SHAPES = [(12, 12), (5, 16), (16, 5), (7, 3), (1, 9), (9, 1)]  # of some, ranks have nothing
LAYOUTS_OF_MATRICES = {
    2: [((2,), ("rows",)), ((2,), ("columns",))],
    4: [((4,), ("rows",)), ((2, 2), ("whole", "rows")), ((2, 2), ("columns", "rows"))],
}


def steps_of_both(mesh, placements, ns_dtype, held_in):
    """Pairs of whole and sharded weights, then momentum, after the same gradients."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from foundry.optim.muon import Muon

    generator = torch.Generator().manual_seed(0)
    draws = [[torch.randn(shape, generator=generator).to(held_in) for shape in SHAPES] for _ in range(STEPS + 1)]
    layout = [{"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}[kind] for kind in placements]
    options = {"lr": 0.1, "momentum": 0.95, "nesterov": True, "ns_steps": 5, "weight_decay": 0.1, "ns_dtype": ns_dtype}
    held = []
    for place in (torch.clone, lambda matrix: distribute_tensor(matrix, mesh, layout)):
        matrices = [torch.nn.Parameter(place(matrix)) for matrix in draws[0]]
        optimizer = Muon(matrices, **options)
        for gradients in draws[1:]:
            for matrix, gradient in zip(matrices, gradients, strict=True):
                matrix.grad = place(gradient)
            optimizer.step()
        momentum = [optimizer.state[matrix]["momentum_buffer"] for matrix in matrices]
        held.append([whole(tensor.detach()) for tensor in (*matrices, *momentum)])
    return list(zip(*held, strict=True))


def different_tensors(world):
    """By layout and types, the shapes of tensors that are not equal bit for bit."""
    from torch.distributed.device_mesh import init_device_mesh

    types = (torch.float32, torch.bfloat16)
    found = {}
    for mesh_shape, placements in LAYOUTS_OF_MATRICES[world.world_size]:
        mesh = init_device_mesh("cpu", mesh_shape)
        for ns_dtype, held_in in product(types, types):
            pairs = steps_of_both(mesh, placements, ns_dtype, held_in)
            assert len(pairs) == 2 * len(SHAPES)
            assert all(torch.isfinite(one).all() for one, _ in pairs)
            wrong = [tuple(one.shape) for one, other in pairs if not torch.equal(one, other)]
            found[mesh_shape, placements, ns_dtype, held_in] = wrong
    return found


@pytest.mark.parametrize("num_ranks", LAYOUTS_OF_MATRICES)
def test_equal_gradients_give_equal_updates_bit_for_bit(num_ranks):
    for found in spawn(different_tensors, num_ranks):
        assert not any(found.values()), found
