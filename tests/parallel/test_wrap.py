"""Wrapping on one process; tests/distributed covers several processes."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from foundry.config.schemas.device import DeviceKind
from foundry.config.schemas.distributed import (
    DDP,
    FSDP,
    HSDP,
    Backend,
    Distributed,
    GradientSync,
    Single,
    resolve_distributed,
)
from foundry.config.schemas.precision import PrecisionMode
from foundry.core.errors import ConfigError
from foundry.core.sharded import sharded_modules
from foundry.models.fsdp_block import FSDPBlock
from foundry.parallel.precision import PrecisionPolicy
from foundry.parallel.process_group import process_group
from foundry.parallel.wrap import parallelize

FP32 = PrecisionPolicy(PrecisionMode.fp32)


class Block(FSDPBlock):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(6, 6), 0

    def forward(self, x):
        self.calls += 1
        return x + self.linear(x).tanh()


def model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(6, 1))


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID", "SLURM_STEPID"):
        monkeypatch.delenv(name, raising=False)


def wrap(config, network=None, **options):
    options = {"grad_checkpointing": False, "torchcompile": False} | options
    with process_group(config, DeviceKind.cpu) as world:
        return parallelize(network or model(), FP32, world, **options)


@pytest.mark.parametrize("policy", GradientSync)
@pytest.mark.parametrize("schema", [Distributed, Single, DDP, FSDP])
def test_one_process_is_the_bare_model_under_every_policy(schema, policy):
    network = model()
    parallel = wrap(schema(gradient_sync=policy), network)
    assert parallel.model is parallel.inner is network
    assert isinstance(resolve_distributed(schema(gradient_sync=policy), 1), Single)
    with parallel.sync.microbatch(first=True, last=True):
        parallel.model(torch.ones(2, 6)).sum().backward()
    parallel.sync.finish()
    assert not dist.is_initialized()


def test_offloading_one_process_shards_over_a_group_of_one():
    config, reference = FSDP(cpu_offload=True, gradient_sync=GradientSync.last_keep_params), model()
    reference(torch.ones(2, 6)).sum().backward()
    with process_group(config, DeviceKind.cpu) as world:
        parallel = parallelize(model(), FP32, world, grad_checkpointing=False, torchcompile=False)
        with parallel.sync.microbatch(first=True, last=True):
            parallel.model(torch.ones(2, 6)).sum().backward()
        parallel.sync.finish()
        for ours, theirs in zip(parallel.model.parameters(), reference.parameters(), strict=True):
            assert isinstance(ours, DTensor)
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
        # Private state of FSDP2: if device and host are the same, nothing else shows the offloading.
        states = [unit._get_fsdp_state() for unit in sharded_modules(parallel.model)]
        assert all(param.offload_to_cpu for state in states for param in state._fsdp_param_group.fsdp_params)
    assert world.distributed is config
    assert not dist.is_initialized()


@pytest.mark.parametrize("has_blocks", [True, False])
def test_sharding_a_model_as_one_unit_logs_a_warning(has_blocks, caplog):
    network = model() if has_blocks else nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))
    reference = copy.deepcopy(network)
    reference(torch.ones(2, 6)).sum().backward()
    with process_group(FSDP(cpu_offload=True), DeviceKind.cpu) as world:
        parallel = parallelize(network, FP32, world, grad_checkpointing=False, torchcompile=False)
        parallel.model(torch.ones(2, 6)).sum().backward()
        for ours, theirs in zip(parallel.model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
    message = (
        "distributed=fsdp: Sequential has no blocks, so all of its weights are gathered at once, which saves little "
        "memory; derive its repeated layers from FSDPBlock, or return their types from get_fsdp_block_types()"
    )
    assert (message in caplog.messages) == (not has_blocks)


def test_checkpointing_recomputes_blocks_and_keeps_gradients():
    plain, network = model(), model()
    parallel = wrap(Distributed(), network, grad_checkpointing=True)
    for each in (plain, parallel.model):
        each(torch.ones(2, 6)).sum().backward()
    assert [block.calls for block in (*plain[:2], *network[:2])] == [1, 1, 2, 2]
    for ours, theirs in zip(network.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    with torch.no_grad():
        network(torch.ones(2, 6))
    assert network[0].calls == 3
    assert list(network.state_dict()) == list(plain.state_dict())


def test_selective_checkpointing_does_not_recompute_matrix_products():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counted(TorchDispatchMode):
        matrices = others = 0

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            is_product = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            self.matrices += is_product
            self.others += not is_product
            return operator(*args, **(kwargs or {}))

    counted, grads = [], []
    for options in ({}, {"selective_checkpointing": True}, {"selective_checkpointing": False}):
        network = wrap(Distributed(), grad_checkpointing=bool(options), **options).model
        with Counted() as counts:
            network(torch.ones(2, 6)).sum().backward()
        counted.append((counts.matrices, counts.others))
        grads.append([parameter.grad for parameter in network.parameters()])
    (plain, _), (selective, _), (full, _) = counted
    assert plain == selective < full
    assert counted[1][1] > counted[0][1]  # The rest of a block is recomputed.
    for other in grads[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(other, grads[0], strict=True))


def test_copied_checkpointed_model_computes_with_its_own_weights():
    network = wrap(Distributed(), grad_checkpointing=True).model
    twin = copy.deepcopy(network)
    for parameter in twin.parameters():
        parameter.data.zero_()
    assert twin(torch.ones(1, 6)).item() == 0.0
    assert network(torch.ones(1, 6)).item() != 0.0


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (HSDP(num_replicas=2), {}, "distributed.num_replicas: is 2 but must divide the 1 rank"),
        (Distributed(backend=Backend.nccl), {}, "distributed.backend: is nccl but the run is on the CPU"),
        (
            Distributed(),
            {"torchcompile": True, "network": nn.Linear(1, 1)},
            "hparams.torchcompile: is true but Linear has",
        ),
        (
            Distributed(),
            {"grad_checkpointing": True, "network": nn.Linear(1, 1)},
            "hparams.grad_checkpointing: is true",
        ),
    ],
)
def test_invalid_parallel_settings_are_refused(config, options, message):
    with pytest.raises(ConfigError) as caught:
        wrap(config, **options)
    assert str(caught.value).startswith(message)


def test_process_group_is_destroyed_if_training_fails():
    def train():
        with process_group(FSDP(cpu_offload=True), DeviceKind.cpu) as world:
            assert dist.is_initialized()
            assert (world.rank, world.world_size, world.device.type, world.is_main) == (0, 1, "cpu", True)
            world.barrier()
            raise ValueError("diverged")

    with pytest.raises(ValueError, match="diverged"):
        train()
    assert not dist.is_initialized()
