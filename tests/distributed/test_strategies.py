"""Every strategy trains as one process under every gradient_sync policy, with the expected collectives."""

from dataclasses import replace

import pytest
from support.harness import count_collectives, run_ranks
from support.toy import FP32, NUM_BLOCKS, Toy, backward_window, largest_difference, train

from foundry.config.schemas.distributed import DDP, FSDP, HSDP, Distributed, GradientSync

pytestmark = pytest.mark.distributed

NUM_UNITS = NUM_BLOCKS + 1
WINDOW = 4

TWO_RANKS = {
    "ddp": DDP(),
    "ddp_small_buckets": DDP(bucket_cap_mb=0.002),
    "ddp_late": DDP(overlap_grad_reduce=False),
    "ddp_sharded_optimizer": DDP(shard_optimizer=True),
    "fsdp": FSDP(),
}
VARIANTS = {
    "fsdp_keep_after_forward": FSDP(reshard_after_forward=False),
    "fsdp_cpu_offload": FSDP(cpu_offload=True),
    "ddp_sharded_optimizer_prefetch": DDP(shard_optimizer=True, overlap_param_gather=True),
    "ddp_sharded_optimizer_late": DDP(shard_optimizer=True, overlap_grad_reduce=False),
    "fsdp_no_prefetch": FSDP(overlap_param_gather=False),
    "auto": Distributed(),
}
FOUR_RANKS = {"hsdp": HSDP(num_replicas=2), "hsdp_of_one_shard": HSDP(num_replicas=4), "ddp": DDP(), "fsdp": FSDP()}


ONE_POLICY = ("ddp_small_buckets", "ddp_sharded_optimizer_prefetch", "fsdp_no_prefetch", "hsdp_of_one_shard", "auto")
CHECKPOINTED = ("ddp-last", "ddp_sharded_optimizer-last", "fsdp-every", "fsdp-last_keep_params", "hsdp-last")


def cases(configs):
    """Yield each strategy with each gradient_sync policy that affects it; those in ONE_POLICY only with `last`."""
    for name, config in configs.items():
        for policy in (GradientSync.last,) if name in ONE_POLICY else GradientSync:
            keeps_nothing = isinstance(config, DDP) and not config.shard_optimizer
            if not (keeps_nothing and policy is GradientSync.last_keep_params):
                yield f"{name}-{policy.value}", replace(config, gradient_sync=policy)


def reference():
    """Train the same steps on one process, with one microbatch per step."""
    import torch

    from foundry.parallel.process_group import World, arrange
    from foundry.parallel.wrap import parallelize

    alone = World.single(torch.device("cpu"))
    parallel = parallelize(Toy(), FP32, arrange(alone, Distributed()), grad_checkpointing=False, torchcompile=False)
    return train(parallel, FP32, alone, num_microbatches=1)


def differences(ours, theirs):
    """Return the largest differences of gradients, gradient norms and parameters."""
    return (
        largest_difference(ours[0], theirs[0]),
        (ours[1] - theirs[1]).abs().max().item(),
        largest_difference(ours[2], theirs[2]),
    )


def train_all(world, configs, num_microbatches):
    from foundry.parallel.process_group import arrange
    from foundry.parallel.wrap import parallelize

    alone = reference()
    results = {}
    for name, config in cases(configs):
        parallel = parallelize(Toy(), FP32, arrange(world, config), grad_checkpointing=False, torchcompile=False)
        trained = train(parallel, FP32, world, num_microbatches=num_microbatches)
        results[name] = differences(trained, alone), _collectives(parallel, world)
    for name, config in cases(configs):
        if name in CHECKPOINTED:
            parallel = parallelize(Toy(), FP32, arrange(world, config), grad_checkpointing=True, torchcompile=False)
            trained = train(parallel, FP32, world, num_microbatches=num_microbatches)
            results[f"{name}-checkpointed"] = differences(trained, alone), _collectives(parallel, world)
    return results


def _collectives(parallel, world):
    """Count the collectives of one window, after DDP has rebuilt its buckets."""
    return count_collectives(lambda: backward_window(parallel, FP32, world, 7, WINDOW))


def named(configs):
    """Return the names of the results that `train_all` returns for `configs`."""
    names = [name for name, _ in cases(configs)]
    return names + [f"{name}-checkpointed" for name in names if name in CHECKPOINTED]


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(train_all, 2, TWO_RANKS, 2)


@pytest.fixture(scope="module")
def variants():
    return run_ranks(train_all, 2, VARIANTS, 2)


@pytest.fixture(scope="module")
def four_ranks():
    return run_ranks(train_all, 4, FOUR_RANKS, 2)


@pytest.mark.parametrize("name", named(TWO_RANKS))
def test_two_ranks_train_as_one(two_ranks, name):
    for of_rank in two_ranks:
        assert max(of_rank[name][0]) < 2e-6


@pytest.mark.long
@pytest.mark.parametrize("name", named(VARIANTS))
def test_strategy_variants_train_as_one(variants, name):
    for of_rank in variants:
        assert max(of_rank[name][0]) < 2e-6


@pytest.mark.long
@pytest.mark.parametrize("name", named(FOUR_RANKS))
def test_four_ranks_train_as_one(four_ranks, name):
    for of_rank in four_ranks:
        assert max(of_rank[name][0]) < 2e-6


# Collectives of one window of WINDOW microbatches. FSDP2 leaves scalars unsharded; they share one all-reduce.
ALL_UNITS, BLOCKS_TWICE = NUM_UNITS, 2 * NUM_BLOCKS + 1
COLLECTIVES = {
    "ddp-every": {"allreduce": WINDOW},
    "ddp-last": {"allreduce": 1},
    "ddp_late-every": {"allreduce": WINDOW},
    "ddp_late-last": {"allreduce": 1},
    "ddp_sharded_optimizer-every": {
        "allgather_base": ALL_UNITS,
        "reduce_scatter_base": ALL_UNITS * WINDOW,
        "allreduce": 1,
    },
    "ddp_sharded_optimizer-last": {"allgather_base": ALL_UNITS, "reduce_scatter_base": ALL_UNITS, "allreduce": 1},
    "fsdp-every": {
        "allgather_base": BLOCKS_TWICE * WINDOW,
        "reduce_scatter_base": ALL_UNITS * WINDOW,
        "allreduce": 1,
    },
    "fsdp-last": {"allgather_base": BLOCKS_TWICE * WINDOW, "reduce_scatter_base": ALL_UNITS, "allreduce": 1},
    "fsdp-last_keep_params": {"allgather_base": ALL_UNITS, "reduce_scatter_base": ALL_UNITS, "allreduce": 1},
}
COLLECTIVES |= {f"{name}-checkpointed": COLLECTIVES[name] for name in COLLECTIVES if name in CHECKPOINTED}
COLLECTIVES_OF_VARIANTS = {
    "fsdp_keep_after_forward-last": {
        "allgather_base": ALL_UNITS * WINDOW,
        "reduce_scatter_base": ALL_UNITS,
        "allreduce": 1,
    },
    "ddp_sharded_optimizer_late-last": {"allgather_base": 1, "reduce_scatter_base": 1, "allreduce": 1},
    "fsdp_no_prefetch-last": COLLECTIVES["fsdp-last"],
}
HSDP_COLLECTIVES = {
    "hsdp-every": {
        "allgather_base": BLOCKS_TWICE * WINDOW,
        "reduce_scatter_base": ALL_UNITS * WINDOW,
        "allreduce": ALL_UNITS * WINDOW + 1,
    },
    "hsdp-last": {
        "allgather_base": BLOCKS_TWICE * WINDOW,
        "reduce_scatter_base": ALL_UNITS,
        "allreduce": ALL_UNITS + 1,
    },
    "hsdp-last_keep_params": {
        "allgather_base": ALL_UNITS,
        "reduce_scatter_base": ALL_UNITS,
        "allreduce": ALL_UNITS + 1,
    },
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_of_a_window_on_two_ranks(two_ranks, name):
    for of_rank in two_ranks:
        assert of_rank[name][1] == COLLECTIVES[name]


@pytest.mark.long
@pytest.mark.parametrize("name", COLLECTIVES_OF_VARIANTS)
def test_collectives_of_a_window_under_strategy_variants(variants, name):
    for of_rank in variants:
        assert of_rank[name][1] == COLLECTIVES_OF_VARIANTS[name]


@pytest.mark.long
@pytest.mark.parametrize("name", HSDP_COLLECTIVES)
def test_collectives_of_a_window_under_hsdp(four_ranks, name):
    for of_rank in four_ranks:
        assert of_rank[name][1] == HSDP_COLLECTIVES[name]


def test_small_ddp_buckets_give_several_all_reduces(two_ranks):
    assert two_ranks[0]["ddp_small_buckets-last"][1]["allreduce"] > 1
