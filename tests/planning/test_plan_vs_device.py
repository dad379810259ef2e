"""What is planned is what lies in a device; on a GPU, its peak as well."""

import pytest
import torch
from support.composition import configure
from support.devices import DEVICES, alone_on

from foundry.config.build import build
from foundry.parallel.precision import PrecisionPolicy
from foundry.parallel.wrap import parallelize
from foundry.parts import build_model, build_objective, build_optimizers
from foundry.planning.fake import build_fake
from foundry.planning.memory import estimate_memory
from foundry.training.ema import WeightAverage
from foundry.training.memory_error import measure_device_memory

SMALL = [
    "model.hidden_size=64",
    "model.intermediate_size=128",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.num_kv_heads=2",
]
LARGE = [
    "model.hidden_size=1024",
    "model.intermediate_size=2816",
    "model.num_layers=12",
    "model.num_heads=16",
    "model.num_kv_heads=4",
]
COMMON = ["optimizer=adamw", "precision=amp_bf16", "hparams.ema_decay=0.9", "hparams.per_gpu_batch_size=8"]
SEQ = 256


def planned_and_measured(device, *overrides):
    """The plan of a configuration, and what a device holds when the gradients of a second step are there."""
    config, world = configure(*COMMON, *overrides), alone_on(device)
    tokens = torch.zeros(config.hparams.per_gpu_batch_size, SEQ, dtype=torch.int64)
    batch = {"tokens": tokens, "targets": tokens.clone(), "position": torch.arange(len(tokens))}
    fake = build_fake(lambda: build(config.model))
    plan = estimate_memory(config, fake, world_size=1, microbatch=batch, device_type=device)
    policy = PrecisionPolicy(config.precision.mode)
    options = {"grad_checkpointing": config.hparams.grad_checkpointing, "torchcompile": False}
    parallel = parallelize(policy.prepare(build_model(config)), policy, world, **options)
    optimizers, objective = build_optimizers(config, parallel.model), build_objective(config, world)
    averages = WeightAverage(parallel.inner, config.hparams.ema_decay)
    on_device = {name: tensor.to(world.device) for name, tensor in batch.items()}
    for number in range(2):
        with policy.window(world.device):
            with policy.autocast(world.device):
                loss = objective.loss(parallel.model, on_device).loss
            loss.backward()
        if number == 0:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return plan, measure_device_memory(parallel.model, optimizers, world.device, averages=averages.average.values())


@pytest.mark.parametrize("device", DEVICES)
def test_the_parts_are_planned_to_the_byte(device):
    plan, held = planned_and_measured(device, *SMALL)
    assert (held.weights, held.gradients, held.ema) == (plan.weights + plan.buffers, plan.gradients, plan.ema)
    # Adam counts its steps in a scalar of each tensor, which the plan leaves out.
    assert plan.optimizer <= held.optimizer < plan.optimizer + 4096


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_peak_is_within_five_percent_of_the_plan(checkpointing):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    overrides = [*LARGE, f"hparams.grad_checkpointing={str(checkpointing).lower()}"]
    plan, _ = planned_and_measured("cuda", *overrides)
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(plan.total, rel=0.05)
