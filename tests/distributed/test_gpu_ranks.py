"""Ranks on GPUs, and the same over gloo: they train as one process, leave a step out together, and say what fails."""

import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from support.devices import DEVICES
from support.harness import spawn
from support.toy import FP32, Toy, largest_difference, train

from foundry.config.schemas.device import DeviceKind
from foundry.config.schemas.distributed import DDP, FSDP, HSDP, Distributed
from foundry.launch.local import WorkerFailed, run_local

pytestmark = pytest.mark.distributed

STRATEGIES = {"ddp": DDP(), "ddp_sharded": DDP(shard_optimizer=True), "fsdp": FSDP(), "hsdp": HSDP(num_replicas=2)}


def number_of_ranks(device):
    """Two, and on GPUs one for each of at most four, an even number."""
    if device == "cpu":
        return 2
    count = min(4, torch.cuda.device_count())
    if count < 2:
        pytest.skip("needs two CUDA devices")
    return count - count % 2


def train_all(world):
    from foundry.parallel.process_group import World, arrange
    from foundry.parallel.wrap import parallelize

    def trained(world, config, **options):
        options |= {"grad_checkpointing": False, "torchcompile": False}
        return train(parallelize(Toy(), FP32, arrange(world, config), **options), FP32, world)

    alone = trained(World(0, 0, 1, 1, world.device), Distributed())
    return {
        name: [largest_difference(ours, theirs) for ours, theirs in ((found[0], alone[0]), (found[2], alone[2]))]
        for name, found in ((name, trained(world, config)) for name, config in STRATEGIES.items())
    }


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
def test_every_strategy_trains_as_one_process(device):
    for of_rank in spawn(train_all, number_of_ranks(device), cuda=device == "cuda"):
        assert of_rank.keys() == STRATEGIES.keys()
        assert max(max(pair) for pair in of_rank.values()) < (2e-6 if device == "cpu" else 2e-5)


def leave_out(world):
    """Two steps, of which the first rank's gradient in the second is infinite; what the scaler and the weights are."""
    from foundry.config.schemas.precision import PrecisionMode
    from foundry.optim.optimizers import adamw
    from foundry.parallel.precision import PrecisionPolicy
    from foundry.parallel.process_group import arrange
    from foundry.parallel.wrap import parallelize

    world, policy = arrange(world, FSDP()), PrecisionPolicy(PrecisionMode.amp_float16)
    parallel = parallelize(policy.prepare(Toy()), policy, world, grad_checkpointing=False, torchcompile=False)
    (optimizer,) = adamw(model=parallel.model, lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    scaler, weights, scales = policy.scaler(world.device), [], []
    for is_bad in (False, True):
        for parameter in parallel.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        if is_bad and world.rank == 0:
            local = next(parallel.model.parameters()).grad
            getattr(local, "_local_tensor", local).fill_(float("inf"))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(float(scaler.get_scale()))
        weights.append([getattr(p, "_local_tensor", p).detach().clone() for p in parallel.model.parameters()])
    return scales, all(torch.equal(before, after) for before, after in zip(*weights, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_an_overflow_on_one_rank_leaves_the_step_out_on_all(device):
    for scales, is_unchanged in spawn(leave_out, number_of_ranks(device), cuda=device == "cuda"):
        assert is_unchanged
        assert scales == [2.0**16, 2.0**15]


def run_out_of_memory(device):
    """The second rank asks for more than any machine has; the others wait for it."""
    from foundry.parallel.process_group import process_group

    with process_group(Distributed(timeout_seconds=120.0), DeviceKind[device]) as world:
        world.barrier()
        if world.rank == 1:
            torch.empty(2**50, dtype=torch.uint8, device=world.device)
        world.barrier()


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
def test_memory_that_runs_out_on_one_rank_is_named_within_half_a_minute(device, monkeypatch):
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join([str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]),
    )
    begin = time.monotonic()
    with pytest.raises(WorkerFailed, match=r"rank 1.*(memory|allocate)"):
        run_local(number_of_ranks(device), partial(run_out_of_memory, device))
    assert time.monotonic() - begin < (60 if device == "cpu" else 30)  # a CPU's ranks start beside other tests
