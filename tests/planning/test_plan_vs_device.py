"""Planned memory matches measured memory of a device: its parts and, on CPU or GPU, its peak."""

from functools import partial

import pytest
import torch
from support.composition import configure
from support.devices import DEVICES, alone_on

from foundry.config.build import build
from foundry.core.ema import WeightAverage
from foundry.core.protocols import Window
from foundry.models.lora import frozen_matrices
from foundry.parallel.precision import PrecisionPolicy
from foundry.parallel.wrap import parallelize
from foundry.parts.model import build_model
from foundry.parts.objective import build_objective
from foundry.parts.optimization import build_optimizers
from foundry.planning.fake import build_adapted, build_fake
from foundry.planning.live_bytes import LiveBytes
from foundry.planning.memory import estimate_memory
from foundry.training.memory_error import measure_device_memory
from foundry.training.step import TrainStep

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
    """Return the plan of a config, and the memory of a device after the backward pass of the second step."""
    config, world = configure(*COMMON, *overrides), alone_on(device)
    tokens = torch.zeros(config.hparams.per_gpu_batch_size, SEQ, dtype=torch.int64)
    batch = {"tokens": tokens, "targets": tokens.clone(), "position": torch.arange(len(tokens))}
    fake = build_fake(lambda: build(config.model))
    plan = estimate_memory(config, fake, world_size=1, microbatch=batch, device_type=device)
    policy = PrecisionPolicy(config.precision.mode)
    options = {"grad_checkpointing": config.hparams.grad_checkpointing, "torchcompile": False}
    parallel = parallelize(policy.prepare(build_model(config)), policy, world, **options)
    optimizers, objective = (
        build_optimizers(config, parallel.model),
        build_objective(config.objective, config.peft, world),
    )
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
def test_planned_parts_equal_device_memory_to_the_byte(device):
    plan, held = planned_and_measured(device, *SMALL)
    weights, gradients, optimizer, ema, _ = held.parts.values()
    assert (weights, gradients, ema) == (plan.weights + plan.buffers, plan.gradients, plan.ema)
    # The plan leaves out the step counter that Adam keeps for each tensor.
    assert plan.optimizer <= optimizer < plan.optimizer + 4096


def plan_of_second_step(device, *overrides, microbatches):
    """Return the plan of a run, the planned bytes of its states, and a function that takes the second step.

    The second step is the first one with optimizer state.
    """
    words = [*COMMON, *overrides]
    size = configure(*words).hparams.per_gpu_batch_size
    config = configure(*words, f"hparams.global_batch_size={size * microbatches}")
    world, policy = alone_on(device), PrecisionPolicy(config.precision.mode)
    tokens = torch.randint(512, (size, SEQ))
    batch = {"tokens": tokens, "targets": tokens.clone(), "position": torch.arange(size)}
    fake = build_fake(lambda: build_adapted(config))
    plan = estimate_memory(config, fake, world_size=1, microbatch=batch, device_type=device)
    model = build_adapted(config)
    frozen = frozen_matrices(model) if config.peft.narrows_base else ()
    options = {"grad_checkpointing": config.hparams.grad_checkpointing, "torchcompile": False}
    parallel = parallelize(policy.prepare(model, frozen), policy, world, **options)
    averages = WeightAverage(parallel.inner, config.hparams.ema_decay)
    step = TrainStep(
        model=parallel.model,
        objective=build_objective(config.objective, config.peft, world),
        optimizers=build_optimizers(config, parallel.model),
        sync=parallel.sync,
        precision=policy,
        world=world,
        max_grad_norm=config.hparams.grad_clip_norm,
    )
    window = Window([batch] * microbatches, size * microbatches)

    def update(number):
        step(window, 1e-3, number)
        averages.update()

    update(1)
    return plan, plan.weights + plan.optimizer + plan.ema + plan.buffers, partial(update, 2)


SIZES = [
    "model.hidden_size=128",
    "model.intermediate_size=512",
    "model.num_layers=6",
    "model.num_heads=4",
    "model.num_kv_heads=4",
    "model.vocab_size=512",
    "data.vocab_size=512",
    "hparams.per_gpu_batch_size=4",
]
CHECKPOINTING = "hparams.grad_checkpointing=true"


@pytest.mark.parametrize(
    ("overrides", "microbatches", "moment"),
    [
        pytest.param([], 1, "forward", id="plain"),
        pytest.param([CHECKPOINTING], 1, "backward", id="checkpointed", marks=pytest.mark.long),
        pytest.param([], 2, "forward", id="accumulated", marks=pytest.mark.long),
        pytest.param([CHECKPOINTING], 2, "forward", id="checkpointed and accumulated", marks=pytest.mark.long),
        pytest.param(
            [CHECKPOINTING, "precision=fp32", "optimizer=muon"], 1, "backward", id="muon", marks=pytest.mark.long
        ),
        pytest.param(
            [CHECKPOINTING, "hparams.per_gpu_batch_size=1"], 1, "backward", id="one sample", marks=pytest.mark.long
        ),
        pytest.param(["peft=lora"], 1, "forward", id="adapters", marks=pytest.mark.long),
    ],
)
def test_measured_peak_of_a_cpu_step_is_within_5_percent_of_the_plan(overrides, microbatches, moment):
    plan, states, step = plan_of_second_step("cpu", *SIZES, *overrides, microbatches=microbatches)
    with LiveBytes() as live:
        step()
    assert plan.peak == moment
    assert states + live.peak == pytest.approx(plan.total, rel=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
def test_measured_peak_of_a_gpu_step_is_within_5_percent_of_the_plan(checkpointing):
    """Workspaces of matrix products, about 32 MiB, are part of the measured memory only."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    overrides = [*LARGE, f"hparams.grad_checkpointing={str(checkpointing).lower()}"]
    plan, _, step = plan_of_second_step("cuda", *overrides, microbatches=1)
    torch.cuda.reset_peak_memory_stats()
    step()
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(plan.total, rel=0.05)
