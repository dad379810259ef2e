"""SGD matches torch's bit for bit, and sharded parameters match whole ones, also with skipped updates."""

import pytest
import torch
from support.harness import run_ranks
from torch import nn

from foundry.optim.sgd import ShardedSGD

SHAPES = [(7, 5), (1, 3), (33, 2)]  # The second has one row, so one of two ranks has no part of it.
OPTIONS = {"lr": 0.1, "weight_decay": 0.1, "fused": True}
MOMENTUM = [(0.0, False), (0.9, False), (0.9, True)]


def drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def steps(optimizer, parameters, place, *, skipped=()):
    """Take six steps: gradients are NaN in skipped steps; the first parameter has no gradient in the second step."""
    for step in range(6):
        for number, (parameter, grad) in enumerate(zip(parameters, drawn(step), strict=True)):
            parameter.grad = place(grad * (float("nan") if step in skipped else 1.0))
            if (step, number) == (1, 0):
                parameter.grad = None
        if skipped:
            optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(float(step in skipped))
        optimizer.step()


@pytest.mark.parametrize(("momentum", "nesterov"), MOMENTUM)
def test_sharded_sgd_matches_torch_sgd_bit_for_bit(momentum, nesterov):
    ours, theirs = ([nn.Parameter(tensor) for tensor in drawn(9)] for _ in range(2))
    options = {**OPTIONS, "momentum": momentum, "nesterov": nesterov}
    one, other = ShardedSGD(ours, **options), torch.optim.SGD(theirs, **options)
    steps(one, ours, torch.clone)
    steps(other, theirs, torch.clone)
    for mine, its in zip(ours, theirs, strict=True):
        assert torch.equal(mine, its)
        if momentum:
            assert torch.equal(one.state[mine]["momentum_buffer"], other.state[its]["momentum_buffer"])


def sharded_beside_whole(world):
    """Return weights and momentum, whole and sharded, after six steps (first and fourth skipped) by `MOMENTUM`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world.world_size,))

    def shard(tensor):
        return distribute_tensor(tensor, mesh, [Shard(0)])

    found = []
    for momentum, nesterov in MOMENTUM:
        for place in (torch.clone, shard):
            parameters = [nn.Parameter(place(tensor)) for tensor in drawn(9)]
            optimizer = ShardedSGD(parameters, **OPTIONS, momentum=momentum, nesterov=nesterov)
            steps(optimizer, parameters, place, skipped=(0, 3))
            held = [*parameters, *(state["momentum_buffer"] for state in optimizer.state.values())]
            found.append([tensor.full_tensor() if place is shard else tensor for tensor in held])
    return [list(zip(*pair, strict=True)) for pair in zip(found[::2], found[1::2], strict=True)]


@pytest.mark.distributed
def test_sharded_sgd_matches_whole_parameters_with_skipped_updates():
    for cases in run_ranks(sharded_beside_whole, 2):
        assert [len(pairs) for pairs in cases] == [3, 6, 6]
        for whole, sharded in (pair for pairs in cases for pair in pairs):
            assert torch.isfinite(whole).all()
            torch.testing.assert_close(sharded, whole, rtol=1e-6, atol=1e-6)  # Rounding differs at the ends of shards.
