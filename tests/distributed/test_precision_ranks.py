"""Each precision trains alike on one process, under DDP and FSDP2; an infinity on one rank skips the step on all."""

import pytest
from support.harness import run_ranks
from support.toy import Toy, backward_window, global_batch, largest_difference, train, whole_parameters

from foundry.config.schemas.distributed import DDP, FSDP, Distributed
from foundry.config.schemas.precision import PrecisionMode

pytestmark = pytest.mark.distributed

WRAPPERS = {
    "ddp": DDP(),
    "ddp_late": DDP(overlap_grad_reduce=False),
    "ddp_sharded_optimizer": DDP(shard_optimizer=True),
    "fsdp": FSDP(),
    "fsdp_cpu_offload": FSDP(cpu_offload=True),
}


def wrap(config, world, policy, seed=0):
    from foundry.parallel.process_group import arrange
    from foundry.parallel.wrap import parallelize

    model = policy.prepare(Toy(seed))
    return parallelize(model, policy, arrange(world, config), grad_checkpointing=False, torchcompile=False)


def train_modes(world):
    import torch

    from foundry.parallel.precision import PrecisionPolicy
    from foundry.parallel.process_group import World

    alone = World.single(torch.device("cpu"))
    tokens = global_batch(0)[0][:, :-1]
    results = {}
    for mode in (PrecisionMode.amp_bfloat16, PrecisionMode.pure_bf16, PrecisionMode.amp_float16):
        policy = PrecisionPolicy(mode)
        single = wrap(Distributed(), alone, policy)
        with policy.autocast(world.device), torch.no_grad():
            logits = single.model(tokens)
        reference = train(single, policy, alone, num_steps=2, num_microbatches=4)
        for name, config in WRAPPERS.items():
            parallel = wrap(config, world, policy)
            with policy.autocast(world.device), torch.no_grad():
                forward = (parallel.model(tokens).float() - logits.float()).abs().max().item()
            trained = train(parallel, policy, world, num_steps=2, num_microbatches=2)
            dtypes = {str(p.dtype) for p in parallel.model.parameters()}
            results[mode.value, name] = (
                forward,
                largest_difference(trained[0], reference[0]),
                largest_difference(trained[2], reference[2]),
                dtypes,
            )
    return results


@pytest.fixture(scope="module")
def modes():
    return run_ranks(train_modes, 2)


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("mode", ["amp_bfloat16", "amp_float16"])
def test_amp_numerics_match_one_process_in_every_wrapper(modes, mode, name):
    for of_rank in modes:
        forward, gradients, parameters, dtypes = of_rank[mode, name]
        assert forward == 0.0
        assert gradients < 2e-3
        assert parameters < 1e-4
        assert dtypes == {"torch.float32"}


@pytest.mark.parametrize("name", WRAPPERS)
def test_pure_bf16_weights_are_bf16_and_match_one_process(modes, name):
    for of_rank in modes:
        forward, _, parameters, dtypes = of_rank["pure_bf16", name]
        assert forward == 0.0
        assert parameters < 0.03
        assert dtypes == {"torch.bfloat16"}


def skip_and_recover(world):
    """Overflow step 1 on rank 1 only and record the trace: every rank skips it, halves the scale and takes step 2."""
    import torch

    from foundry.parallel.precision import LossScaler, PrecisionPolicy

    policy = PrecisionPolicy(PrecisionMode.amp_float16)
    results = {}
    for name, config in WRAPPERS.items():
        parallel = wrap(config, world, policy)
        optimizer = torch.optim.AdamW(parallel.model.parameters(), lr=1e-2)
        scaler = LossScaler(world.device, init_scale=1024.0, growth_interval=2)
        trace = []
        for step in range(4):
            optimizer.zero_grad()
            backward_window(parallel, policy, world, step, 2, scaler.scale)
            if step == 1 and world.rank == 1:
                # An infinity in one shard after the reduction must be communicated to the other ranks.
                gradient = next(p.grad for p in parallel.model.parameters() if p.ndim == 2)
                (gradient.to_local() if hasattr(gradient, "to_local") else gradient).view(-1)[0] = float("inf")
            before = whole_parameters(parallel)
            scaler.unscale_(optimizer)
            stepped = scaler.step(optimizer)
            scaler.update()
            moved = largest_difference(whole_parameters(parallel), before) > 0
            trace.append((stepped, moved, scaler.get_scale()))
        results[name] = trace
    return results


def test_overflow_on_one_rank_halves_the_loss_scale_on_all():
    # Two good steps after the skipped one double the scale again.
    expected = [(True, True, 1024.0), (False, False, 512.0), (True, True, 512.0), (True, True, 1024.0)]
    for of_rank in run_ranks(skip_and_recover, 2):
        for name in WRAPPERS:
            assert of_rank[name] == expected, name
