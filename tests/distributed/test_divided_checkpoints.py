"""Tensor-parallel checkpoints load in every other layout bit for bit, and vice versa."""

from functools import partial

import pytest
from support.harness import run_ranks
from support.toy import FP32

from foundry.config.schemas.distributed import DDP, FSDP, HSDP, Distributed

pytestmark = pytest.mark.distributed
# Tensor parallelism leaves a rank 31 or 5 rows of a matrix, which FSDP2 shards unevenly.
SIZES = {"vocab_size": 62, "hidden_size": 12, "intermediate_size": 10, "num_heads": 2, "num_kv_heads": 2}
LAYOUTS = {
    "one": (1, Distributed()),
    "tp_1x2": (2, FSDP(tensor_parallel=2)),
    "tp_2x2": (4, FSDP(tensor_parallel=2)),
    "fsdp_4": (4, FSDP()),
    "hsdp_2x1x2": (4, HSDP(tensor_parallel=2, num_replicas=2)),
    "ddp_sharded_2x2": (4, DDP(tensor_parallel=2, shard_optimizer=True)),
}


def build(world, config, seed):
    import torch

    from foundry.core.ema import WeightAverage
    from foundry.models.transformer import Transformer
    from foundry.optim.optimizers import muon
    from foundry.parallel.process_group import arrange
    from foundry.parallel.wrap import parallelize

    torch.manual_seed(seed)
    model = Transformer(**SIZES, num_layers=2, max_seq_len=8)
    parallel = parallelize(model, FP32, arrange(world, config), grad_checkpointing=False, torchcompile=False)
    common = {"model": parallel.model, "lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.1}
    optimizers = muon(**common, momentum=0.95, nesterov=True, ns_steps=5, row_variance=True)
    return parallel, WeightAverage(parallel.inner, 0.9), optimizers


def save(world, root, config, name, source=None):
    """Save a checkpoint after two steps, or of the state restored from `source`."""
    import torch
    from support.checkpoint_parts import saver

    from foundry.checkpoint.tensors import collect, describe, restore_into
    from foundry.models.token_loss import TokenLoss
    from foundry.run_dir.checkpoints import find

    parallel, ema, optimizers = build(world, config, seed=1 if source is None else 2)
    if source is not None:
        restore_into(find(root / source), parallel.model, ema, optimizers, world=world)
    for step in range(2 if source is None else 0):
        tokens = torch.randint(62, (2, 9), generator=torch.Generator().manual_seed(step))
        with parallel.sync.microbatch(first=True, last=True):
            parallel.model(tokens[:, :-1], tokens[:, 1:], token_loss=TokenLoss()).loss.backward()
        parallel.sync.finish()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        ema.update()
    checkpointer = saver(root / name, world, asynchronous=True)
    manifest = {"samples": 32, "optimizer": describe(parallel.model, optimizers)}
    tensors = partial(collect, parallel.model, ema, optimizers)
    checkpointer.write(2, tensors=tensors, manifest=manifest, rank_state={"rank": world.rank})
    checkpointer.finish()


def read(root, name):
    """Return the whole tensors of a checkpoint by name."""
    import torch

    from foundry.checkpoint.shard import Chunk
    from foundry.checkpoint.tensor_index import read_index
    from foundry.run_dir.checkpoints import find

    index = read_index(find(root / name))
    tensors = {key: torch.empty(index.shape(key), dtype=index.dtype(key)) for key in index.entries}
    index.fill({key: Chunk(tensor, (0,) * tensor.ndim) for key, tensor in tensors.items()})
    return tensors


def check_same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if one[name].dtype != other[name].dtype or not one[name].equal(other[name])] == []


def save_all(world, root, jobs):
    for job in jobs:
        save(world, root, *job)


@pytest.mark.long
def test_every_tensor_parallel_layout_loads_every_other_bit_for_bit(tmp_path):
    for size in (1, 2, 4):
        run_ranks(
            save_all, size, tmp_path, [(config, name) for name, (ranks, config) in LAYOUTS.items() if ranks == size]
        )
    saved = {name: read(tmp_path, name) for name in LAYOUTS}
    for name, tensors in saved.items():
        assert {key: tensor.shape for key, tensor in tensors.items()} == {k: t.shape for k, t in saved["one"].items()}
        differing = max(float((tensors[key] - whole).abs().max()) for key, whole in saved["one"].items())
        assert differing < 1e-4, name
    for size in (1, 2, 4):
        own = {name: config for name, (ranks, config) in LAYOUTS.items() if ranks == size}
        jobs = [(config, f"{name} of {other}", other) for name, config in own.items() for other in LAYOUTS]
        run_ranks(save_all, size, tmp_path, jobs)
    for name in LAYOUTS:
        for other in LAYOUTS:
            check_same(read(tmp_path, f"{name} of {other}"), saved[other])


@pytest.mark.long
def test_replicated_tensors_are_written_by_one_rank(tmp_path):
    """The files together are as large as the tensors; replicated tensors such as norms have one writer."""
    import json

    (ranks, config), files = LAYOUTS["tp_2x2"], []
    run_ranks(save, ranks, tmp_path, config, "tp_2x2")
    wholes = read(tmp_path, "tp_2x2")
    for path in sorted(tmp_path.glob("tp_2x2/checkpoints/step_*/*.safetensors")):
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        files.append(sum(e["data_offsets"][1] - e["data_offsets"][0] for k, e in header.items() if k != "__metadata__"))
    assert len(files) == ranks
    assert sum(files) == sum(tensor.numel() * tensor.element_size() for tensor in wholes.values())
    assert max(files) < 1.3 * min(files)
