"""A NaN loss on one rank stops the run or skips the step on all ranks; the message names that rank."""

import pytest
from support.harness import run_ranks
from support.toy import FP32, Toy, full_tensor, global_batch, sum_loss, whole_parameters

from foundry.config.schemas.distributed import DDP, FSDP

pytestmark = pytest.mark.distributed

WRAPPERS = {"ddp": DDP(), "fsdp": FSDP()}


class Sums:
    def __init__(self, rank):
        self.rank = rank

    def num_valid(self, microbatch):
        return int(microbatch["valid"].sum())

    def loss(self, model, microbatch):
        from foundry.core.protocols import LossSum

        total = sum_loss(model, microbatch["tokens"], microbatch["valid"])
        bad = self.rank == 1 and bool(microbatch["bad"].any())
        return LossSum(total * float("nan") if bad else total)


def window(world, step, bad, positions=False):
    import torch

    from foundry.core.protocols import Window

    tokens, valid = global_batch(step)
    share = len(tokens) // world.world_size
    part = slice(world.rank * share, (world.rank + 1) * share)
    microbatch = {"tokens": tokens[part], "valid": valid[part], "bad": torch.full((share,), bad)}
    if positions:
        microbatch["position"] = torch.arange(len(tokens))[part] + step * len(tokens)
    return Window([microbatch], len(tokens))


def parse_step(parallel, optimizers, world, **options):
    from foundry.training.step import TrainStep

    return TrainStep(
        model=parallel.model,
        objective=Sums(world.rank),
        optimizers=optimizers,
        sync=parallel.sync,
        precision=FP32,
        world=world,
        max_grad_norm=1.0,
        **options,
    )


def stop(world):
    from foundry.optim.optimizers import adamw
    from foundry.parallel.process_group import arrange
    from foundry.parallel.wrap import parallelize
    from foundry.training.guards import NonFiniteError

    results = {}
    for name, config in WRAPPERS.items():
        parallel = parallelize(Toy(), FP32, arrange(world, config), grad_checkpointing=False, torchcompile=False)
        optimizers = adamw(model=parallel.model, lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
        step = parse_step(parallel, optimizers, world)
        good = step(window(world, 0, False), 1e-2, 1).loss.item()
        before = whole_parameters(parallel)
        try:
            step(window(world, 1, True), 1e-2, 2)
            message = "nothing"
        except NonFiniteError as error:
            message = str(error)
        after = whole_parameters(parallel)
        results[name] = good, message, all(bool((after[key] == before[key]).all()) for key in before)
    return results


def test_nonfinite_loss_on_one_rank_stops_all_and_names_the_rank():
    first, second = run_ranks(stop, 2)
    for name in WRAPPERS:
        assert first[name] == second[name]
        loss, message, unchanged = first[name]
        assert 1.0 < loss < 50.0
        assert message == "step 2: the loss on rank 1 is not finite; this step did not change the weights"
        assert unchanged


def skip(world, on_device):
    """Compare a run with a bad step to a run without that step; return skipped steps, equality and warnings."""
    import logging

    from foundry.config.schemas.guard import Guard, NonFinite
    from foundry.core.ema import WeightAverage
    from foundry.optim.optimizers import muon
    from foundry.parallel.process_group import arrange
    from foundry.parallel.wrap import parallelize
    from foundry.training.guards import UpdateGuard

    message, results = [], {}
    handler = logging.Handler()
    handler.emit = lambda record: message.append(record.getMessage())
    logging.getLogger("foundry.training.guards").addHandler(handler)
    guard = Guard(non_finite=NonFinite.skip)
    options = {"lr": 1e-2, "momentum": 0.95, "nesterov": True, "ns_steps": 5, "weight_decay": 0.1}

    def run(config, numbers, bad):
        parallel = parallelize(Toy(), FP32, arrange(world, config), grad_checkpointing=False, torchcompile=False)
        optimizers = muon(model=parallel.model, beta1=0.9, beta2=0.95, eps=1e-8, **options)
        step = parse_step(parallel, optimizers, world, guard=guard)
        step.guard = UpdateGuard(guard, optimizers, world, on_device=on_device)
        average, skipped = WeightAverage(parallel.inner, 0.5), []
        for number in numbers:
            result = step(window(world, number, number == bad, positions=True), 1e-2, number)
            average.update(result.skipped)
            skipped.append(bool(result.skipped))
        step.guard.check()
        return {
            **whole_parameters(parallel),
            **{f"ema.{k}": full_tensor(v) for k, v in average.average.items()},
        }, skipped

    for name, config in WRAPPERS.items():
        ours, skipped = run(config, (1, 2, 3), bad=2)
        theirs, _ = run(config, (1, 3), bad=None)
        results[name] = skipped, all(bool((ours[key] == theirs[key]).all()) for key in ours | theirs)
    return results, message


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_nonfinite_loss_on_one_rank_is_skipped_by_all(on_device):
    (first, message), (second, unsaid) = run_ranks(skip, 2, on_device)
    assert first == second == dict.fromkeys(WRAPPERS, ([False, True, False], True))
    line = "step 2: the loss on rank 1 is not finite; its update is skipped, 1 in a row of at most 3"
    assert message == [f"{line} (samples 32 to 47 of the global order)"] * len(WRAPPERS)
    assert unsaid == []
