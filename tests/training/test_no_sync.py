"""No synchronization with the device between logged steps: models, accumulation, clipping and weight averages."""

import pytest
import torch
from support.composition import configure
from support.devices import DEVICES, Operations, alone_on, waiting_is_an_error
from support.tiny import SMALL_LM, TINY_DIT

from foundry.core.ema import WeightAverage
from foundry.core.protocols import Window
from foundry.models.fsdp_block import find_blocks
from foundry.parallel.precision import PrecisionPolicy
from foundry.parallel.wrap import parallelize
from foundry.parts.model import build_model
from foundry.parts.objective import build_objective
from foundry.parts.optimization import build_optimizers
from foundry.training.block_norms import BlockNorms, group_by_block
from foundry.training.step import TrainStep

SETTINGS = ["hparams.grad_clip_norm=1.0", "hparams.ema_decay=0.9", "precision=amp_bf16", "optimizer=adamw"]
HF = ["model=hf_llama", "model.config.hidden_size=32", "model.config.intermediate_size=64", "debug=fast"]
MODELS = {
    "transformer": SMALL_LM,
    "transformer, checkpointed": [*SMALL_LM, "hparams.grad_checkpointing=true"],
    "transformers": [*HF, "data.seq_len=32"],
    "dit": TINY_DIT,
}
WARM_STEPS, STEPS, MICROBATCHES = 2, 10, 3
LOOKS_OF_THE_GUARD = 2
LOOKS_AT_THE_BATCH = {"cross_entropy": 3, "mse": 1}
"""Reads per microbatch, from host memory: padding samples and the number of valid targets."""


def microbatch(config, device):
    position = torch.arange(2)
    if config.hparams.loss_function == "mse":
        found = {"images": torch.zeros(2, 1, 8, 8), "labels": position % 10, "position": position}
    else:
        tokens = torch.zeros(2, 32, dtype=torch.int64)
        found = {"tokens": tokens, "targets": tokens.clone(), "position": position}
    return {name: tensor.pin_memory() if device == "cuda" else tensor for name, tensor in found.items()}


def build_step(overrides, device):
    """Build an optimizer step as in a run, and the weight averages."""
    config, world = configure(*overrides, *SETTINGS), alone_on(device)
    policy = PrecisionPolicy(config.precision.mode)
    options = {"grad_checkpointing": config.hparams.grad_checkpointing, "torchcompile": False}
    parallel = parallelize(policy.prepare(build_model(config)), policy, world, **options)
    step = TrainStep(
        model=parallel.model,
        objective=build_objective(config.objective, config.peft, world),
        optimizers=build_optimizers(config, parallel.model),
        sync=parallel.sync,
        precision=policy,
        world=world,
        max_grad_norm=config.hparams.grad_clip_norm,
        guard=config.guard,
        norms=BlockNorms(
            group_by_block(parallel.inner, find_blocks(parallel.inner)), every_n_steps=2, device=world.device
        ),
    )
    return config, step, WeightAverage(parallel.inner, config.hparams.ema_decay)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", MODELS)
def test_ten_accumulated_steps_wait_for_nothing(model, device):
    """On a CPU the guard reads loss and gradient, and reads are counted; on a GPU a synchronization is an error."""
    config, step, averages = build_step(MODELS[model], device)

    def take(number):
        window = Window([microbatch(config, device) for _ in range(MICROBATCHES)], 2 * MICROBATCHES)
        averages.update(step(window, 1e-3, number).skipped)

    for number in range(1, WARM_STEPS + 1):  # Initialize libraries and optimizer state.
        take(number)
    with Operations() as operations, waiting_is_an_error(device):
        for number in range(WARM_STEPS + 1, WARM_STEPS + STEPS + 1):
            take(number)
    if device == "cpu":
        of_batch = MICROBATCHES * LOOKS_AT_THE_BATCH[config.hparams.loss_function]
        assert operations.num_reads == STEPS * (LOOKS_OF_THE_GUARD + of_batch)
