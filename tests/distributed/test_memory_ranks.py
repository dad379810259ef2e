"""Weights, gradients, optimizer state and averages on a rank have exactly the planned bytes."""

import pytest
from support.composition import configure
from support.harness import run_ranks

pytestmark = pytest.mark.distributed

# Four ranks cannot divide the rows of a matrix evenly (307, 7, 6 or 2); two rows are fewer than the ranks.
MODEL = ["model.vocab_size=307", "model.hidden_size=6", "model.intermediate_size=7", "model.num_layers=3"]
HEADS = ["model.num_heads=3", "model.num_kv_heads=1", "data.vocab_size=300", "data.seq_len=5"]
BATCH = ["hparams.per_gpu_batch_size=2", "hparams.ema_decay=0.9"]


def of_ranks(world_size, *overrides, tensor_parallel=1):
    """Compose a config with two microbatches per step on each rank or tensor-parallel group."""
    size = [f"distributed.nproc_per_node={world_size}", f"distributed.tensor_parallel={tensor_parallel}"]
    batch = [f"hparams.global_batch_size={4 * world_size // tensor_parallel}", *size]
    return configure(*MODEL, *HEADS, *BATCH, *batch, *overrides)


def plan(config, world_size):
    from foundry.config.build import build
    from foundry.planning.fake import build_fake
    from foundry.planning.memory import estimate_memory

    fake = build_fake(lambda: build(config.model))
    return estimate_memory(config, fake, world_size=world_size, microbatch=None, device_type="cuda")


def measure(world, configs):
    """Return the bytes of each kind that this rank holds in a step, for each configuration."""
    return [_measure_one(world, config) for config in configs]


def _measure_one(world, config):
    import torch
    from torch.distributed.tensor import DTensor

    from foundry.config.build import build
    from foundry.core.ema import WeightAverage
    from foundry.parallel.precision import PrecisionPolicy
    from foundry.parallel.process_group import arrange
    from foundry.parallel.wrap import parallelize

    torch.manual_seed(0)
    policy = PrecisionPolicy(config.precision.mode)
    parallel = parallelize(
        policy.prepare(build(config.model)),
        policy,
        arrange(world, config.distributed),
        grad_checkpointing=False,
        torchcompile=False,
    )
    ema = WeightAverage(parallel.inner, config.hparams.ema_decay)
    optimizers = build(config.optimizer, model=parallel.model, lr=config.hparams.lr)
    objective = build(config.objective)
    tokens = torch.randint(307, (2, 5))
    gradients, gathered = [], 0
    for last in (False, True):
        with parallel.sync.microbatch(first=not last, last=last):
            with policy.autocast(world.device):
                loss = objective.loss(parallel.model, {"tokens": tokens, "targets": tokens, "position": tokens[:, 0]})
            loss.loss.backward()
        if not last:
            gathered = num_bytes(_gathered(parallel.model))
        gradients.append(num_bytes(_held_gradients(parallel.model)))
    parallel.sync.finish()
    for optimizer in optimizers:
        optimizer.step()
    parameters, grads, averages = list(parallel.model.parameters()), _grads(parallel.model), list(ema.average.values())
    states = [
        t for o in optimizers for held in o.state.values() for t in held.values() if torch.is_tensor(t) and t.ndim
    ]
    sharded = [t for t in (*parameters, *grads, *averages, *states) if isinstance(t, DTensor)]
    return {
        "weights": num_bytes(parameters),
        "gradients": max(*gradients, num_bytes(grads)),
        "optimizer": num_bytes(states),
        "ema": num_bytes(averages),
        "sharded": num_bytes(sharded),
        "gathered": gathered,
    }


def num_bytes(tensors):
    from torch.distributed.tensor import DTensor

    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def _grads(model):
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _fsdp_params(model):
    from torch.distributed.fsdp import FSDPModule

    groups = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)]
    return [param for group in groups if group is not None for param in group.fsdp_params]


def _held_gradients(model):
    """Return all gradients after a backward pass: of parameters, and unsharded ones that FSDP2 accumulates."""
    whole = [param.unsharded_accumulated_grad for param in _fsdp_params(model)]
    whole += [getattr(getattr(param, "_unsharded_param", None), "grad", None) for param in _fsdp_params(model)]
    return list({id(grad): grad for grad in (*_grads(model), *whole) if grad is not None}.values())


def _gathered(model):
    """Return the unsharded weights that currently have storage."""
    whole = [param._unsharded_param for param in _fsdp_params(model)]
    return [tensor for tensor in whole if tensor.untyped_storage().nbytes() > 0]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (1, ["", "optimizer=adamw precision=pure_bf16"]),
        (
            2,
            [
                "distributed=ddp optimizer=adamw",
                "distributed=ddp distributed.overlap_grad_reduce=false optimizer=sgd",
                "distributed=ddp distributed.shard_optimizer=true optimizer=adamw",
                "distributed=ddp distributed.shard_optimizer=true distributed.overlap_grad_reduce=false",
                "distributed=fsdp",
                "distributed=fsdp optimizer=adamw distributed.gradient_sync=every",
                "distributed=fsdp optimizer=adamw precision=pure_bf16",
                "distributed=fsdp optimizer=sgd precision=fp32 distributed.gradient_sync=last_keep_params",
            ],
        ),
        pytest.param(
            4,
            [
                "distributed=hsdp optimizer=adamw",
                "distributed=hsdp distributed.gradient_sync=every",
                "distributed=fsdp",
            ],
            marks=pytest.mark.long,
        ),
    ],
    ids=["one", "two", "four"],
)
def test_memory_of_ranks_equals_the_plan(world_size, cases):
    check(world_size, cases, [of_ranks(world_size, *case.split()) for case in cases])


def check(world_size, cases, configs):
    measured = run_ranks(measure, world_size, configs)[0]
    for case, config, found in zip(cases, configs, measured, strict=True):
        planned = plan(config, world_size)
        for part in ("weights", "gradients", "optimizer", "ema"):
            assert found[part] == getattr(planned, part), (case, part)
        if "shard_optimizer" in case or "last_keep_params" in case:
            assert found["gathered"] == planned.gathered, case


DIVISIBLE = (
    "model.vocab_size=308 model.hidden_size=12 model.intermediate_size=10 model.num_heads=2 model.num_kv_heads=2"
)


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (2, ["distributed=fsdp optimizer=adamw"]),
        pytest.param(
            4,
            [
                "distributed=fsdp optimizer=adamw precision=fp32",
                "distributed=fsdp distributed.gradient_sync=last_keep_params",
                "distributed=hsdp optimizer=adamw distributed.num_replicas=2",
                "distributed=ddp distributed.shard_optimizer=true optimizer=sgd model.tie_embeddings=true",
            ],
            marks=pytest.mark.long,
        ),
    ],
    ids=["two", "four"],
)
def test_memory_of_tensor_parallel_ranks_equals_the_plan(world_size, cases):
    configs = [of_ranks(world_size, *case.split(), *DIVISIBLE.split(), tensor_parallel=2) for case in cases]
    check(world_size, cases, configs)


@pytest.mark.long
def test_cpu_offload_moves_exactly_the_sharded_bytes_to_the_host():
    config = of_ranks(2, "distributed=fsdp", "distributed.cpu_offload=true", "distributed.gradient_sync=every")
    found, planned = run_ranks(measure, 2, [config])[0][0], plan(config, 2)
    assert planned.host == found["sharded"]
    assert planned.weights + planned.gradients + planned.optimizer + planned.ema == sum(
        found[part] for part in ("weights", "gradients", "optimizer", "ema")
    )
