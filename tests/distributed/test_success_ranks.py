"""Simulation episodes are equal bit for bit on one process and on two ranks under DDP and FSDP2."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.harness import run_ranks

from foundry.config.schemas.distributed import DDP, FSDP


def measure(model, world):
    import torch
    from support.contexts import evaluation_context
    from support.policy_parts import DATA, Wandering
    from support.reach import Reach

    from foundry.tasks.robots.evaluators.success import Success

    evaluator = Success(objective=Wandering(), data=DATA, simulator=Reach, episodes=11, at_a_time=3)
    with TemporaryDirectory() as folder, torch.no_grad():
        found = evaluator.evaluate(model, evaluation_context(Path(folder), step=1, world=world))
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return found, files


def on_ranks(world):
    from support.policy_parts import GoThere

    from foundry.config.schemas.precision import PrecisionMode
    from foundry.parallel.precision import PrecisionPolicy
    from foundry.parallel.process_group import arrange
    from foundry.parallel.wrap import parallelize

    found = []
    for config in (DDP(), FSDP()):
        own, policy = arrange(world, config), PrecisionPolicy(PrecisionMode.fp32)
        parallel = parallelize(GoThere(), policy, own, grad_checkpointing=False, torchcompile=False)
        found.append(measure(parallel.model.eval(), own))
    return found


@pytest.mark.distributed
def test_success_rate_and_files_on_two_ranks_match_one_process():
    import torch
    from support.policy_parts import GoThere

    from foundry.parallel.process_group import World

    metrics, files = measure(GoThere().eval(), World.single(torch.device("cpu")))
    assert 0 < metrics["success"] < 1
    assert sorted(files) == ["rollouts.gif", "rollouts.jsonl", "rollouts_00000001.gif"]
    first, second = run_ranks(on_ranks, 2)
    assert first == [(metrics, files)] * 2
    assert second == [(metrics, {})] * 2  # Only rank 0 writes files.
