"""A model that returns logits has the same gradients under DDP, FSDP2 and one process."""

import pytest
import torch
from support.harness import run_ranks
from support.toy import FP32, NUM_SAMPLES, Toy, full_tensor, global_batch, largest_difference, sum_loss

from foundry.config.schemas.distributed import DDP, FSDP

pytestmark = pytest.mark.distributed


def alone():
    """Return gradients of the summed cross-entropy of the global batch."""
    model, (tokens, valid) = Toy(), global_batch(1)
    sum_loss(model, tokens, valid).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def differences(world):
    from foundry.models.logits import answer_with_log_probs
    from foundry.objectives.next_token import NextToken
    from foundry.parallel.process_group import arrange
    from foundry.parallel.wrap import parallelize

    tokens, valid = global_batch(1)
    part = slice(world.rank, NUM_SAMPLES, world.world_size)
    targets = tokens[:, 1:].masked_fill(~valid, -100)
    microbatch = {"tokens": tokens[part, :-1], "targets": targets[part], "position": torch.arange(NUM_SAMPLES)[part]}
    found = {}
    for name, config in {"ddp": DDP(), "fsdp": FSDP()}.items():
        model = Toy()
        answer_with_log_probs(model, tile_tokens=5)
        parallel = parallelize(model, FP32, arrange(world, config), grad_checkpointing=True, torchcompile=False)
        with parallel.sync.microbatch(first=True, last=True):
            (NextToken().loss(parallel.model, microbatch).loss * world.world_size).backward()
        parallel.sync.finish()
        gradients = {name: full_tensor(parameter.grad) for name, parameter in parallel.inner.named_parameters()}
        found[name] = largest_difference(gradients, alone())
    return found


def test_logits_model_gradients_on_two_ranks_match_one_process():
    for of_rank in run_ranks(differences, 2):
        assert of_rank.keys() == {"ddp", "fsdp"}
        assert max(of_rank.values()) < 2e-4  # Rounding of sums over up to 96 tokens.
