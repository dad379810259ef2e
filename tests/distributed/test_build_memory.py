"""Building a sharded model needs memory for the rank's shards and at most two whole units."""

import gc
import sys
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from support.composition import configure
from support.examples import some_of
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from foundry.core.sharded import local_part
from foundry.models.fsdp_block import find_blocks
from foundry.parallel.precision import PrecisionPolicy
from foundry.parallel.process_group import World, arrange
from foundry.parallel.wrap import parallelize, place_frozen
from foundry.parts.model import start_model

pytestmark = [
    pytest.mark.distributed,
    # torch issues this warning when it imports its compiler.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

RANKS = 64
# Blocks of 262,000 parameters; embeddings and head are small in comparison.
MODEL = [
    "model.hidden_size=128",
    "model.intermediate_size=512",
    "model.num_layers=8",
    "model.num_heads=4",
    "model.num_kv_heads=4",
    "model.vocab_size=260",
    "data.vocab_size=260",
    "data.seq_len=16",
    "hparams.global_batch_size=512",
    "hparams.per_gpu_batch_size=1",
    f"distributed.nproc_per_node={RANKS}",
]


class PeakMemory(TorchDispatchMode):
    """Records the peak bytes of the live tensors that operations have returned, without meta tensors."""

    def __init__(self):
        super().__init__()
        self.peak, self._alive = 0, {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        output = operator(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and type(tensor) is torch.Tensor and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        self.peak = max(self.peak, self.bytes)
        return output

    @property
    def bytes(self):
        return sum(size for reference, size in self._alive.values() if not reference.expired())


@contextmanager
def one_of_many_ranks():
    """Start a fake process group as rank 0; the other ranks do not exist and nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    gc.disable()  # Count whole parameters that only reference cycles keep alive.
    try:
        yield World(0, 0, RANKS, 8, torch.device("cpu"))
    finally:
        gc.enable()
        dist.destroy_process_group()


def build(overrides, *, frozen=False, options=None):
    """Return the bytes of one block, of this rank's final shards, and the peak during construction."""
    config = configure(*MODEL, *overrides)
    policy = PrecisionPolicy(config.precision.mode)
    with one_of_many_ranks() as world:
        world = arrange(world, config.distributed)
        initial = start_model(config)
        model = policy.prepare(initial.model)
        block = max(sum(p.nbytes for p in each.parameters()) for each in find_blocks(model))
        with PeakMemory() as memory:
            if frozen:
                built = place_frozen(model, policy, world, fill=initial.fill)
            else:
                both = {"grad_checkpointing": False, "torchcompile": False} | (options or {})
                built = parallelize(model, policy, world, fill=initial.fill, **both).model
        parts = [local_part(parameter) for parameter in built.parameters()]
        assert not any(part.is_meta for part in parts)
        return block, sum(part.nbytes for part in parts), memory.peak


FSDP, TENSOR_PARALLEL = "distributed=fsdp", "distributed.tensor_parallel=2"
BUILDS = {
    "fsdp": ([FSDP], False, None),
    "bf16": ([FSDP, "precision=pure_bf16"], False, None),
    "frozen": ([FSDP], True, None),
    "offload": ([FSDP, "distributed.cpu_offload=true"], False, None),
    "hsdp": (["distributed=hsdp", "distributed.num_replicas=2"], False, None),
    "divided": ([FSDP, TENSOR_PARALLEL], False, None),
    "divided, frozen": ([FSDP, TENSOR_PARALLEL], True, None),
    "sharded optimizer": (["distributed=ddp", "distributed.shard_optimizer=true"], False, None),
    "compiled": ([FSDP], False, {"grad_checkpointing": True, "torchcompile": True}),
}
"""Arguments of `build` by name."""


@pytest.mark.parametrize("name", some_of(BUILDS, "fsdp", "sharded optimizer"))
def test_building_a_sharded_model_holds_at_most_two_whole_units(name):
    overrides, frozen, options = BUILDS[name]
    block, shards, peak = build(overrides, frozen=frozen, options=options)
    assert shards < 0.6 * block
    assert block < peak < shards + 2.2 * block


@pytest.mark.long
def test_frames_kept_by_torch_imports_do_not_keep_parameters_alive(monkeypatch):
    """`torch.fx.wrap` keeps the stack frames of the first collective's callers until a full garbage collection."""
    frames, all_reduce = [], dist.all_reduce

    def keeps_frames(*args, **kwargs):
        frames.append(sys._getframe())
        return all_reduce(*args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", keeps_frames)
    block, shards, peak = build(["distributed=fsdp"])
    assert frames
    assert peak < shards + 2.2 * block
