"""Independent generation on gathered weights under every wrapper: no rank waits and training is unchanged."""

from functools import cache

import pytest
from support.harness import run_ranks

from foundry.config.schemas.distributed import DDP, FSDP
from foundry.config.schemas.precision import PrecisionMode

pytestmark = pytest.mark.distributed
CONFIGS = {
    "ddp": DDP(),
    "ddp_sharded_optimizer": DDP(shard_optimizer=True),
    "fsdp": FSDP(),
    "fsdp_kept": FSDP(reshard_after_forward=False),
}
MODES = (PrecisionMode.fp32, PrecisionMode.amp_bfloat16)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8], [9, 10], [11], [12, 13]]


def built():
    import torch

    from foundry.models.transformer import Transformer

    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    return Transformer(vocab_size=40, max_seq_len=32, init_std=0.3, **sizes)


def continued(model, prompts, world, policy):
    from foundry.generation.decoding import Decoding, generate

    decoding = Decoding(max_new_tokens=12, stop_ids=frozenset({7, 8}))
    with policy.autocast(world.device):
        found = generate(model, prompts, decoding, context=32, device=world.device, batch_size=2)
    return [continuation.tokens for continuation in found]


def steps(parallel, policy, world, number):
    """Return the losses of SGD steps on the same tokens on all ranks."""
    import torch

    tokens, losses = torch.arange(24).view(2, 12) % 40, []
    for _ in range(number):
        with parallel.sync.microbatch(first=True, last=True), policy.autocast(world.device):
            loss = -parallel.model(tokens, tokens.roll(-1, 1)).log_prob.mean()
            loss.backward()
        parallel.sync.finish()
        with torch.no_grad():
            for parameter in parallel.model.parameters():
                parameter -= 0.05 * parameter.grad
                parameter.grad = None
        losses.append(loss.item())
    return losses


def run(world, mode, is_disturbed):
    from foundry.parallel.precision import PrecisionPolicy
    from foundry.parallel.whole_weights import gathered
    from foundry.parallel.wrap import parallelize

    policy = PrecisionPolicy(mode)
    parallel = parallelize(built(), policy, world, grad_checkpointing=False, torchcompile=False)
    own = PROMPTS[: 6 if world.rank == 0 else 1]
    found, losses = [], []
    for _ in range(3):
        if is_disturbed:
            with gathered(parallel.model) as whole:
                found.append(continued(whole, own, world, policy))
        losses += steps(parallel, policy, world, 1)
    size = sum(getattr(p, "_local_tensor", p).numel() for p in parallel.model.parameters())
    return found, losses, size


def run_all(world):
    from foundry.parallel.process_group import arrange

    return {
        (name, mode, is_disturbed): run(arrange(world, config), mode, is_disturbed)
        for name, config in CONFIGS.items()
        for mode in MODES
        for is_disturbed in (True, False)
    }


@pytest.fixture(scope="module")
def of_ranks():
    return run_ranks(run_all, 2)


@cache
def continued_alone(mode):
    """Return the continuations on one process before the first step."""
    import torch

    from foundry.parallel.precision import PrecisionPolicy
    from foundry.parallel.process_group import World

    return continued(built(), PROMPTS, World.single(torch.device("cpu")), PrecisionPolicy(mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_generate_independently_without_affecting_training(of_ranks, name, mode):
    (found, losses, size), (less, other_losses, _) = (rank[name, mode, True] for rank in of_ranks)
    assert losses == other_losses == of_ranks[0][name, mode, False][1]
    whole = sum(parameter.numel() for parameter in built().parameters())
    assert size == whole if name == "ddp" else size < 0.6 * whole
    assert [tokens[:1] for tokens in found] == less
    assert found[0] != found[2], "the weights have changed"
    assert continued_alone(mode) == found[0]


def called_once(world, free_bytes):
    """Return the number of collectives of a forward pass and its result, with the given free memory on each rank."""
    from unittest.mock import patch

    import torch
    from support.harness import count_collectives

    from foundry.parallel import whole_weights
    from foundry.parallel.precision import PrecisionPolicy
    from foundry.parallel.process_group import arrange
    from foundry.parallel.wrap import parallelize

    world = arrange(world, FSDP())
    options = {"grad_checkpointing": False, "torchcompile": False}
    model = parallelize(built(), PrecisionPolicy(PrecisionMode.fp32), world, **options).model
    tokens, results = torch.arange(24).view(2, 12), []
    free_memory = patch.object(whole_weights, "free_memory", lambda device, local_world_size: free_bytes[world.rank])
    with free_memory, torch.no_grad(), whole_weights.gathered_if_they_fit(model, world) as entered:
        counts = count_collectives(lambda: results.append(entered(tokens, tokens)))
    return sum(counts.values()), results[0].log_prob.tolist()


def test_weights_are_gathered_only_if_every_rank_has_memory():
    needed = 8 * sum(parameter.numel() for parameter in built().parameters())
    (fit, result), (also_fits, _) = run_ranks(called_once, 2, [needed, needed])
    (lacks, same), (also_lacks, _) = run_ranks(called_once, 2, [needed, needed - 1])
    assert fit == also_fits == 0
    assert lacks == also_lacks == 3  # One for each of two layers, and one for the root.
    assert same == result
