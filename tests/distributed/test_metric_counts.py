"""Metrics with their own counts are equal on one process and on two, even if a rank lacks a metric."""

from pathlib import Path

import pytest
from support.harness import run_ranks
from support.toy import FP32

from foundry.config.schemas.distributed import DDP

pytestmark = pytest.mark.distributed


class Counted:
    """Half the squared error, the absolute error of marked samples, and a metric of the first microbatch only."""

    metrics = ("marked_error", "first", "never")

    def num_valid(self, microbatch):
        return len(microbatch["x"])

    def loss(self, model, microbatch):
        from foundry.core.protocols import LossSum, Mean

        error = model(microbatch["x"]).squeeze(-1) - microbatch["y"]
        marked = microbatch["marked"]
        metrics = {"marked_error": Mean((error.abs() * marked).sum(), marked.sum())}
        if int(microbatch["position"][0]) == 0:
            metrics["first"] = Mean(error.sum())
        return LossSum(0.5 * error.square().sum(), metrics)


def measure(world, batch):
    """Return the metrics of an evaluation and of a step, and the number of all-reduces of the step."""
    import torch
    import torch.distributed as dist
    from support.contexts import run_context

    from foundry.core.protocols import Window
    from foundry.data.splits import DataSplits
    from foundry.evaluators.held_out import HeldOut
    from foundry.optim.optimizers import adamw
    from foundry.parallel.process_group import arrange
    from foundry.parallel.wrap import parallelize
    from foundry.training.evaluation import Evaluation
    from foundry.training.metric_sums import read_means
    from foundry.training.step import TrainStep

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    parallel = parallelize(model, FP32, arrange(world, DDP()), grad_checkpointing=False, torchcompile=False)
    rows = [{name: tensor[index] for name, tensor in batch.items()} for index in range(8)]
    data = DataSplits(train=rows, validation=rows, fingerprint="")
    evaluation = Evaluation(
        model=parallel.model,
        evaluators={"held_out": HeldOut(objective=Counted(), data=data, per_gpu_batch_size=2)},
        run=run_context(world=world),
        folder=Path(),
    )
    measured, _ = evaluation.measure(1, lambda what: None)
    step = TrainStep(
        model=parallel.model,
        objective=Counted(),
        optimizers=adamw(model=parallel.model, lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1),
        sync=parallel.sync,
        precision=FP32,
        world=world,
        max_grad_norm=None,
    )
    batch = {**batch, "position": torch.arange(8)}
    parts = [
        {name: tensor[start : start + 2] for name, tensor in batch.items()}
        for start in range(2 * world.rank, 8, 2 * world.world_size)
    ]
    reduced, all_reduce = [], dist.all_reduce
    dist.all_reduce = lambda tensor, *args, **options: (reduced.append(tensor), all_reduce(tensor, *args, **options))
    result = step(Window(parts, 8), 1e-2, 1)
    dist.all_reduce = all_reduce
    return measured, read_means(result.metrics)[0], len(reduced)


def test_metric_counts_are_reduced_together_with_sums():
    import torch

    from foundry.parallel.process_group import World

    generator = torch.Generator().manual_seed(1)
    batch = {
        "x": torch.randn(8, 3, generator=generator),
        "y": torch.randn(8, generator=generator),
        "marked": torch.tensor([1.0, 0, 0, 0, 0, 1, 1, 0]),
    }
    evaluated, stepped, _ = measure(World.single(torch.device("cpu")), batch)
    torch.manual_seed(0)
    error = (torch.nn.Linear(3, 1)(batch["x"]).squeeze(-1) - batch["y"]).detach()
    wanted = {
        "marked_error": float((error.abs() * batch["marked"]).sum() / 3),
        "first": float(error[:2].mean()),
    }
    assert stepped == pytest.approx(wanted, rel=1e-5)
    loss = float(0.5 * error.square().mean())
    assert evaluated == pytest.approx(
        {"val_loss": loss, "val_marked_error": wanted["marked_error"], "val_first": wanted["first"]}, rel=1e-5
    )
    for measured, metrics, collectives in run_ranks(measure, 2, batch):
        assert measured == pytest.approx(evaluated, rel=1e-6)
        assert "never" not in metrics
        assert metrics == pytest.approx(stepped, rel=1e-6)
        assert collectives == 2, "the count before the forward pass, and the sums after it"
