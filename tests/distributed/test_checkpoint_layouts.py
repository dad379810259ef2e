"""Checkpoints of one layout load in every other layout bit for bit; with the same layout, training resumes exactly."""

import numpy
import pytest
import torch
from support.harness import run_ranks
from support.toy import FP32, Toy, backward_window
from torch import nn

from foundry.config.schemas.distributed import DDP, FSDP, HSDP, Distributed

pytestmark = pytest.mark.distributed

LAYOUTS = {
    1: {"none": Distributed()},
    2: {"ddp_2": DDP(), "ddp_sharded_2": DDP(shard_optimizer=True), "fsdp_2": FSDP()},
    4: {"fsdp_4": FSDP(), "hsdp_2x2": HSDP(num_replicas=2)},
}
NAMES = [name for layouts in LAYOUTS.values() for name in layouts]
OPTIMIZERS = ("adamw", "muon", "muon_rows")


class Odd(Toy):
    """A model whose parameter `pair` is too small for four ranks."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.pair = nn.Parameter(torch.tensor([0.1, -0.2]))

    def forward(self, tokens):
        return super().forward(tokens) * (1 + self.pair.prod())


def build(kind, config, world, seed):
    from foundry.core.ema import WeightAverage
    from foundry.optim.optimizers import adamw, muon
    from foundry.parallel.process_group import arrange
    from foundry.parallel.wrap import parallelize

    parallel = parallelize(Odd(seed), FP32, arrange(world, config), grad_checkpointing=False, torchcompile=False)
    common = {"model": parallel.model, "lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.1}
    own = {"momentum": 0.95, "nesterov": True, "ns_steps": 5, "row_variance": kind == "muon_rows"}
    optimizers = adamw(**common) if kind == "adamw" else muon(**common, **own)
    return parallel, WeightAverage(parallel.inner, 0.9), optimizers


def train(parallel, ema, optimizers, world, steps):
    for step in steps:
        backward_window(parallel, FP32, world, step, 1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        ema.update()


def own_parts(parts, world):
    """Return this rank's part of every tensor that it would write, with its offsets."""
    from foundry.checkpoint.shard import own_chunks
    from foundry.checkpoint.tensors import collect

    chunks = own_chunks(collect(parts[0].model, *parts[1:]), rank=world.rank, world_size=world.world_size)
    return {name: (chunk.offsets, chunk.local.numpy().copy()) for name, chunk in chunks.items()}


def wholes(ranks):
    """Concatenate the parts of all ranks into whole tensors, which are sharded along their first dimension."""
    pieces = {}
    for parts in ranks:
        for name, (offsets, array) in parts.items():
            pieces.setdefault(name, []).append((offsets, array))
    ordered = {
        name: [array for _, array in sorted(given, key=lambda piece: piece[0])] for name, given in pieces.items()
    }
    return {name: arrays[0] if len(arrays) == 1 else numpy.concatenate(arrays) for name, arrays in ordered.items()}


def save_all(world, root):
    """Save a checkpoint of each layout and optimizer; return this rank's parts at the save and one step later."""
    from functools import partial

    from support.checkpoint_parts import saver

    from foundry.checkpoint.tensors import collect

    results = {}
    for name, config in LAYOUTS[world.world_size].items():
        for kind in OPTIMIZERS:
            parallel, ema, optimizers = parts = build(kind, config, world, seed=1)
            train(*parts, world, range(2))
            checkpointer = saver(root / f"{name}-{kind}", world, asynchronous=True)
            tensors = partial(collect, parallel.model, ema, optimizers)
            checkpointer.write(2, tensors=tensors, manifest={"samples": 32}, rank_state={"rank": world.rank})
            saved = own_parts(parts, world)
            train(*parts, world, [2])
            checkpointer.finish()
            results[f"{name}-{kind}"] = saved, own_parts(parts, world)
    return results


def load_all(world, root, reference):
    """Return (loading layout, saving layout, optimizer, name) of each tensor that differs after a load or a step."""
    from foundry.checkpoint.tensors import restore_into
    from foundry.run_dir.checkpoints import find

    wrong = []
    for name, config in LAYOUTS[world.world_size].items():
        for kind in OPTIMIZERS:
            parts = build(kind, config, world, seed=2)
            # Load the checkpoint of the same layout last, to resume from it.
            for other in sorted(NAMES, key=name.__eq__):
                restore_into(find(root / f"{other}-{kind}"), parts[0].model, *parts[1:])
                wrong += [(name, other, kind, key) for key in differing(world, parts, reference[f"{other}-{kind}"][0])]
            parts[1].load_state_dict({"updates": 2})
            train(*parts, world, [2])
            wrong += [(name, "later", kind, key) for key in differing(world, parts, reference[f"{name}-{kind}"][1])]
    return wrong


def differing(world, parts, expected):
    """Return the names of tensors whose part on this rank differs from that of the expected whole tensor."""
    wrong = []
    for name, (offsets, ours) in own_parts(parts, world).items():
        place = tuple(slice(begin, begin + size) for begin, size in zip(offsets, ours.shape, strict=True))
        if ours.dtype != expected[name].dtype or (ours != expected[name][place]).any():
            wrong.append(name)
    return wrong


@pytest.mark.long
def test_every_layout_loads_checkpoints_of_every_other_layout(tmp_path):
    reference = {}
    for world_size in LAYOUTS:
        ranks = run_ranks(save_all, world_size, tmp_path)
        for name in ranks[0]:
            reference[name] = tuple(wholes([rank[name][moment] for rank in ranks]) for moment in (0, 1))
    assert len(reference) == len(NAMES) * len(OPTIMIZERS)
    shapes = {
        tuple((key, array.shape) for key, array in sorted(saved.items()))
        for name, (saved, _) in reference.items()
        if name.endswith("muon")
    }
    assert len(shapes) == 1, "all layouts save the same tensors"
    for name in NAMES[1:]:
        sizes = [path.stat().st_size for path in (tmp_path / f"{name}-adamw").glob("checkpoints/step_*/shard-*")]
        assert len(sizes) == int(name[-1]) ** (2 if name.startswith("hsdp") else 1)
        assert max(sizes) < 1.3 * min(sizes), (name, sizes)
    for world_size in LAYOUTS:
        for wrong in run_ranks(load_all, world_size, tmp_path, reference):
            assert wrong == []
