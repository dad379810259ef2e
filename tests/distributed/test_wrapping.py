"""Effects and errors of wrapping; the checks share one group of two ranks."""

import math
from dataclasses import replace
from functools import partialmethod

import pytest
from support.harness import count_collectives, recorded_collectives, run_ranks, spawn
from support.toy import (
    FP32,
    NUM_BLOCKS,
    Toy,
    backward_window,
    full_tensor,
    global_batch,
    largest_difference,
    sum_loss,
    train,
)

from foundry.config.schemas.distributed import DDP, FSDP, HSDP, GradientSync, Single
from foundry.config.schemas.precision import PrecisionMode

pytestmark = pytest.mark.distributed


def wrap(config, world, *, policy=FP32, model=None, grad_checkpointing=False, torchcompile=False):
    from foundry.parallel.process_group import arrange
    from foundry.parallel.wrap import parallelize

    model = Toy() if model is None else model
    return parallelize(
        model, policy, arrange(world, config), grad_checkpointing=grad_checkpointing, torchcompile=torchcompile
    )


def check_names(world):
    """Parameter names survive checkpointing and every wrapper."""
    names = [name for name, _ in Toy().named_parameters()]
    for config in (DDP(), DDP(overlap_grad_reduce=False), DDP(shard_optimizer=True), FSDP()):
        parallel = wrap(config, world, grad_checkpointing=True)
        assert [name for name, _ in parallel.inner.named_parameters()] == names
        assert sorted(parallel.inner.state_dict()) == sorted(Toy().state_dict())


def check_scalars_stay_equal(world):
    """A 0-dim parameter is unsharded and bitwise equal on all ranks after training."""
    import torch
    from torch.distributed.tensor import DTensor

    parallel = wrap(FSDP(), world)
    train(parallel, FP32, world)
    scalars = [p for p in parallel.model.parameters() if p.ndim == 0]
    assert len(scalars) == NUM_BLOCKS + 1
    assert not any(isinstance(p, DTensor) for p in scalars)
    mine = torch.stack([p.detach() for p in scalars])
    assert not torch.equal(mine, torch.tensor([0.8] * NUM_BLOCKS + [1.5]))
    gathered = [torch.empty_like(mine) for _ in range(world.world_size)]
    torch.distributed.all_gather(gathered, mine)
    assert torch.equal(gathered[0], gathered[1])


def check_nothing_is_stale_after_evaluation(world):
    """The second of two evaluations sees weights changed in place in between."""
    import torch

    for config in (DDP(shard_optimizer=True), FSDP(reshard_after_forward=False)):
        parallel = wrap(config, world)
        train(parallel, FP32, world, num_steps=1)
        tokens = global_batch(0)[0][:, :-1]
        with torch.no_grad():
            parallel.model(tokens)
            for parameter in parallel.model.parameters():
                parameter.zero_()
            expected = parallel.model.offset.expand(*tokens.shape, -1)
            assert torch.equal(parallel.model(tokens), expected)


def check_different_start_is_named(world):
    from foundry.parallel.wrap import RanksDifferError

    model = Toy()
    model.blocks[1].mlp[0].bias.data += world.rank * 1e-7
    with pytest.raises(RanksDifferError, match=r"blocks\.1\.mlp\.0\.bias \(24,\) is not the same on all ranks"):
        wrap(FSDP(), world, model=model)
    model = Toy()
    model.offset.fill_(float("nan"))
    wrap(DDP(), world, model=model)
    model.offset[3] = float(world.rank)
    with pytest.raises(RanksDifferError, match="offset"):
        wrap(DDP(), world, model=model)


def check_refusals(world):
    from foundry.core.errors import ConfigError

    keep = GradientSync.last_keep_params
    for config, key in (
        (DDP(gradient_sync=keep), "distributed.gradient_sync: is last_keep_params but ddp never frees its parameters"),
        (DDP(gradient_sync=keep, overlap_grad_reduce=False), "distributed.gradient_sync: is last_keep_params"),
        (DDP(overlap_param_gather=True), "distributed.overlap_param_gather: is true but there is nothing to gather"),
        (DDP(overlap_grad_reduce=False, bucket_cap_mb=5.0), "distributed.bucket_cap_mb: is 5 but"),
        (HSDP(num_replicas=3), "distributed.num_replicas: is 3 but must divide the 2 ranks"),
        (Single(), "distributed: none is for one process but 2 processes"),
    ):
        with pytest.raises(ConfigError) as caught:
            wrap(config, world)
        assert str(caught.value).startswith(key)


def check_sync_is_found_behind_wrappers(world):
    """gradient_sync acts although torch.compile's module hides the type FSDPModule; an unwrapped model is refused."""
    import torch

    from foundry.core.errors import ConfigError
    from foundry.parallel.gradient_sync import DDPSync, FSDPSync

    class Hidden(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self._orig_mod = model

    compiled = torch.compile(wrap(FSDP(), world).model)
    hidden = Hidden(compiled)
    sync = FSDPSync(hidden, GradientSync.last, world)
    tokens = global_batch(0)[0]
    for last, reductions in ((False, 0), (True, NUM_BLOCKS + 1)):

        def step(last=last):
            with sync.microbatch(first=not last, last=last):
                compiled._orig_mod(tokens[:, :-1]).sum().backward()

        assert count_collectives(step).get("reduce_scatter_base", 0) == reductions
    DDPSync(Hidden(wrap(DDP(), world).model), GradientSync.last)
    for kind, more in ((FSDPSync, (world,)), (DDPSync, ())):
        with pytest.raises(ConfigError, match="gradient_sync: is last but has no effect"):
            kind(Toy(), GradientSync.last, *more)


def check_grad_norm_of_a_mixture(world):
    """Plain and sharded gradients share one norm; the clipped gradient has the requested norm."""
    import torch

    from foundry.parallel.grad_norm import clip_grad_norm_

    for config in (FSDP(), FSDP(cpu_offload=True), DDP(shard_optimizer=True), DDP()):
        parallel = wrap(config, world)
        backward_window(parallel, FP32, world, 0, 2)
        parameters = list(parallel.model.parameters())
        expected = torch.cat([full_tensor(p.grad).flatten() for p in parameters]).norm()
        norm = clip_grad_norm_(parameters, 0.1)
        assert type(norm) is torch.Tensor
        assert norm.shape == ()
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(clip_grad_norm_(parameters, math.inf), torch.tensor(0.1), rtol=1e-5, atol=0)


def check_overlap_of_reductions(world):
    """DDP reduces during the backward pass, or sends nothing before the window is finished."""
    tokens, valid = global_batch(0)
    for overlaps, during, after in ((True, 1, 0), (False, 0, 1)):
        parallel = wrap(DDP(overlap_grad_reduce=overlaps), world)

        def backward(parallel=parallel):
            with parallel.sync.microbatch(first=True, last=True):
                sum_loss(parallel.model, tokens, valid).backward()

        assert count_collectives(backward).get("allreduce", 0) == during
        assert count_collectives(parallel.sync.finish).get("allreduce", 0) == after


def check_gathers_ahead(world):
    """Prefetching gathers one more FSDP2 unit before each block computes."""
    blocks = range(1, NUM_BLOCKS + 1)
    for config in (FSDP(), DDP(shard_optimizer=True)):
        for overlaps in (False, True):
            parallel = wrap(replace(config, overlap_param_gather=overlaps), world)
            forward, backward = gathers_before_blocks(parallel)
            assert forward == [min(1 + block + overlaps, NUM_BLOCKS + 1) for block in blocks], config
            if isinstance(config, FSDP):  # FSDP gathers the blocks again in the backward pass, from the last one on.
                again = [min(block + overlaps, NUM_BLOCKS) for block in blocks]
                assert backward == [NUM_BLOCKS + 1 + gathered for gathered in again]


def gathers_before_blocks(parallel):
    """Return the all-gathers begun before each block's MLP in the forward pass and in the backward pass."""
    forward, backward, tokens = [], [], global_batch(0)[0][:, :-1]
    with recorded_collectives() as sent:

        def note(begun):
            begun.append(sum(name == "allgather_base" for name, _ in sent))

        for block in parallel.inner.blocks:
            block.mlp.register_forward_pre_hook(lambda *_: note(forward))
            block.mlp.register_full_backward_pre_hook(lambda *_: note(backward))
        with parallel.sync.microbatch(first=True, last=True):
            parallel.model(tokens).sum().backward()
    return forward, backward


def check_weights_kept_after_forward(world):
    """The backward pass gathers each block again, unless the forward pass has kept it."""
    for frees in (True, False):
        parallel = wrap(FSDP(reshard_after_forward=frees), world)
        sent = count_collectives(lambda parallel=parallel: backward_window(parallel, FP32, world, 0, 1))
        assert sent["allgather_base"] == NUM_BLOCKS + 1 + NUM_BLOCKS * frees


def check_types_of_traffic(world):
    """Under amp the matrices of blocks are gathered in bf16; root parameters and all gradients are sent in fp32."""
    import torch

    from foundry.parallel.precision import PrecisionPolicy

    policy = PrecisionPolicy(PrecisionMode.amp_bfloat16)
    for config in (FSDP(gradient_sync=GradientSync.last_keep_params), DDP(shard_optimizer=True)):
        parallel = wrap(config, world, policy=policy)
        with recorded_collectives() as sent:
            backward_window(parallel, policy, world, 0, 1)
        gathered, reduced = (
            [dtype for name, dtype in sent if name == kind] for kind in ("allgather_base", "reduce_scatter_base")
        )
        assert gathered == [torch.float32] + [torch.bfloat16] * NUM_BLOCKS
        assert reduced == [torch.float32] * (NUM_BLOCKS + 1)


def check_world(world):
    import torch

    assert world.is_main == (world.rank == 0)
    assert world.all_reduce_sum(torch.tensor([1.0, world.rank])).tolist() == [2.0, 1.0]


CHECKS = {check.__name__.removeprefix("check_"): check for check in (
    check_names,
    check_scalars_stay_equal,
    check_nothing_is_stale_after_evaluation,
    check_different_start_is_named,
    check_refusals,
    check_sync_is_found_behind_wrappers,
    check_grad_norm_of_a_mixture,
    check_overlap_of_reductions,
    check_gathers_ahead,
    check_weights_kept_after_forward,
    check_types_of_traffic,
    check_world,
)}  # fmt: skip


def run_checks(world):
    import traceback

    outcomes = {}
    for name, check in CHECKS.items():
        try:
            check(world)
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
    return outcomes


@pytest.fixture(scope="module")
def outcomes():
    return run_ranks(run_checks, 2)


@pytest.mark.parametrize("name", CHECKS)
def test_wrapping_check_on_two_ranks(outcomes, name):
    for of_rank in outcomes:
        assert not of_rank[name], of_rank[name]


def count_graphs(world):
    import torch
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    torch.nn.Module.compile = partialmethod(torch.nn.Module.compile, backend=counter)
    parallel = wrap(DDP(bucket_cap_mb=0.001), world, torchcompile=True)  # A bucket is smaller than a block.
    backward_window(parallel, FP32, world, 7, 1)
    return counter.frame_count


@pytest.mark.long
def test_compiled_block_is_one_graph_with_any_bucket_size():
    alone = [1] * 2  # The blocks are alike and share one graph.
    assert spawn(count_graphs, 2, timeout_seconds=500.0) == alone


def train_compiled(world):
    import torch

    # Test tracing, which hooks and checkpointing can break, without minutes of generating C++.
    torch.nn.Module.compile = partialmethod(torch.nn.Module.compile, backend="aot_eager")
    results = {}
    reference = train(wrap(FSDP(), world), FP32, world)
    fsdp = replace(FSDP(), gradient_sync=GradientSync.last_keep_params)
    for name, config in (("ddp", DDP()), ("fsdp", fsdp)):
        parallel = wrap(config, world, grad_checkpointing=config is fsdp, torchcompile=True)
        trained = train(parallel, FP32, world)
        counts = count_collectives(lambda parallel=parallel: backward_window(parallel, FP32, world, 7, 4))
        names = [key for key, _ in parallel.inner.named_parameters()]
        results[name] = (largest_difference(trained[2], reference[2]), counts, names)
    return results


@pytest.mark.long
def test_compiled_blocks_keep_numbers_names_and_deferral():
    for of_rank in spawn(train_compiled, 2, timeout_seconds=500.0):
        sharded = {"allgather_base": NUM_BLOCKS + 1, "reduce_scatter_base": NUM_BLOCKS + 1, "allreduce": 1}
        assert of_rank["ddp"][1] == {"allreduce": 1}
        assert of_rank["fsdp"][1] == sharded
        for difference, _, names in of_rank.values():
            assert difference < 2e-6
            assert names == [name for name, _ in Toy().named_parameters()]
