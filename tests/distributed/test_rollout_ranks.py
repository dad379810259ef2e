"""Equal weights give equal rollouts on one process and on two or four ranks under DDP and FSDP2."""

import pytest
from support.harness import run_ranks

from foundry.config.schemas.distributed import DDP, FSDP

REWARDED = {"updates_per_rollout": 2, "ref_policy_kl_penalty": 0.1}


def windows(model, reference, world, size):
    """Return the microbatches (as lists), metrics and token counts of the windows of two rollouts."""
    from support.rollout_parts import make_objective, make_source

    objective = make_objective(reference, **REWARDED, generation_batch_size=size)
    source = make_source(objective, model, world=world, frozen=[reference], per_gpu_batch_size=2)
    found = [source.next_window() for _ in range(4)]
    names = ("position", "tokens", "targets", "is_counted", "advantage", "sampler", "old", "reference")
    parts = [[{name: part[name].tolist() for name in names} for part in window.microbatches] for window in found]
    return parts, [dict(window.metrics) for window in found], [window.num_tokens for window in found]


def on_ranks(world, size):
    from support.rollout_parts import make_model

    from foundry.config.schemas.precision import PrecisionMode
    from foundry.parallel.precision import PrecisionPolicy
    from foundry.parallel.process_group import arrange
    from foundry.parallel.wrap import parallelize, place_frozen

    policy, found = PrecisionPolicy(PrecisionMode.fp32), []
    for config in (DDP(), FSDP()):
        own = arrange(world, config)
        parallel = parallelize(make_model(), policy, own, grad_checkpointing=False, torchcompile=False)
        found.append(windows(parallel.model, place_frozen(make_model(4), policy, own), own, size))
    return found


def close(one, other):
    assert one.keys() == other.keys()
    for name in one:
        if name in ("position", "tokens", "targets", "is_counted"):
            assert one[name] == other[name], name
        else:
            for row, expected in zip(one[name], other[name], strict=True):
                assert row == pytest.approx(expected, abs=1e-5), name


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize(("size", "ranks"), [(3, 2), (3, 4), (1000, 2)])
def test_rollouts_are_the_same_on_any_number_of_ranks(size, ranks):
    """Each rank has more completions than it generates at a time, or one of them generates all."""
    import torch
    from support.rollout_parts import make_model

    from foundry.parallel.process_group import World

    alone, metrics, tokens = windows(make_model(), make_model(4), World.single(torch.device("cpu")), size)
    results = run_ranks(on_ranks, ranks, size)
    for strategy in range(2):
        for rank in range(ranks):
            parts, own_metrics, own_tokens = results[rank][strategy]
            assert own_tokens == tokens
            for one, expected in zip(own_metrics, metrics, strict=True):
                assert one == pytest.approx(expected, abs=1e-6)
            for window, whole in zip(parts, alone, strict=True):
                for number, part in enumerate(window):
                    close(part, whole[ranks * number + rank])
