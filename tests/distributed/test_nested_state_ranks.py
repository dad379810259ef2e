"""Nested state of an optimizer on several ranks: sharded where it is shaped as its parameter."""

import pytest
from harness import spawn
from nested_optimizer import Nested
from toy import FP32, Toy, backward_window

from foundry.config.schemas.distributed import DDP, FSDP, HSDP

pytestmark = pytest.mark.distributed

LAYOUTS = {"ddp": (2, DDP()), "fsdp": (2, FSDP()), "hsdp": (4, HSDP(num_replicas=2))}


def build(config, world, seed):
    from foundry.parallel.process_group import arrange
    from foundry.parallel.wrap import parallelize

    parallel = parallelize(Toy(seed), FP32, arrange(world, config), grad_checkpointing=False, torchcompile=False)
    return parallel, [Nested(parallel.model.parameters(), only_shaped=True)]


def train(parallel, optimizers, world, steps):
    for step in steps:
        backward_window(parallel, FP32, world, step, 1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def values(parallel, optimizers):
    from torch.distributed.tensor import DTensor

    from foundry.checkpoint.tensors import collect, describe

    tensors = collect(parallel.model, None, optimizers)
    local = {
        name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone() for name, tensor in tensors.items()
    }
    return local, describe(parallel.model, optimizers), [type(tensor).__name__ for tensor in tensors.values()]


def save_and_restore(world, root, config):
    """What differs right after restoring, and after another step."""
    import torch

    from foundry.checkpoint.saver import Checkpointer
    from foundry.checkpoint.tensors import collect, describe, restore_into
    from foundry.run_dir.checkpoints import find

    first = build(config, world, seed=1)
    train(*first, world, range(2))
    checkpointer = Checkpointer(root, world, asynchronous=False, keep_last=None, keep_every_steps=None, strict=True)
    checkpointer.save(
        2,
        tensors=lambda: collect(first[0].model, None, first[1]),
        manifest={"samples": 32, "optimizer": describe(first[0].model, first[1])},
        rank_state={},
        wait=True,
    )
    second = build(config, world, seed=2)
    restore_into(find(root), second[0].model, None, second[1])
    wrong = []
    for steps in ([], [2]):
        train(*first, world, steps)
        train(*second, world, steps)
        ours, theirs = values(*first), values(*second)
        wrong += [name for name in ours[0] if not torch.equal(ours[0][name], theirs[0][name])]
        wrong += ["description"] * (ours[1] != theirs[1]) + ["kinds"] * (ours[2] != theirs[2])
    return wrong


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_restored_bit_for_bit(tmp_path, layout):
    world_size, config = LAYOUTS[layout]
    assert spawn(save_and_restore, world_size, tmp_path, config) == [[]] * world_size
