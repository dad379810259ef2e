"""Ranks that share data, as under context parallelism, are counted once: four ranks in two pairs."""

from pathlib import Path

import pytest
from support.harness import run_ranks
from support.toy import FP32, full_tensor

from foundry.config.schemas.distributed import DDP, FSDP, Single

pytestmark = pytest.mark.distributed
SIZE, BATCH, PER_RANK = 16, 8, 2
CONFIGS = {
    "ddp": DDP(),
    "ddp_in_one_piece": DDP(overlap_grad_reduce=False),
    "ddp_sharded_optimizer": DDP(shard_optimizer=True),
    "fsdp": FSDP(),
}


class Regression:
    """Squared and absolute error of the marked samples."""

    metrics = ("absolute",)

    def num_valid(self, microbatch):
        return int(microbatch["marked"].sum())

    def loss(self, model, microbatch):
        from foundry.core.protocols import LossSum, Mean

        error = (model(microbatch["x"]).squeeze(-1) - microbatch["y"]) * microbatch["marked"]
        return LossSum(error.square().sum(), {"absolute": Mean(error.abs().sum())})


def rows():
    import torch

    generator = torch.Generator().manual_seed(3)
    return [
        {
            "x": torch.randn(3, generator=generator),
            "y": torch.randn((), generator=generator),
            "marked": torch.tensor(float(index % 3 > 0)),
        }
        for index in range(SIZE)
    ]


def train(world):
    """Run two steps and an evaluation; return the positions read, the metrics and the weights."""
    import torch
    from support.contexts import run_context

    from foundry.data.loader import Loader
    from foundry.data.order import GlobalOrder
    from foundry.data.splits import DataSplits
    from foundry.evaluators.held_out import HeldOut
    from foundry.optim.optimizers import adamw
    from foundry.parallel.wrap import parallelize
    from foundry.training.evaluation import Evaluation
    from foundry.training.metric_sums import read_means
    from foundry.training.step import TrainStep

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    parallel = parallelize(model, FP32, world, grad_checkpointing=False, torchcompile=False)
    data = DataSplits(train=rows(), validation=rows()[:5], fingerprint="")
    loader = Loader(
        dataset=data.train,
        order=GlobalOrder(num_samples=SIZE, fingerprint="", seed=0),
        batch_size_at=lambda samples: BATCH,
        per_gpu_batch_size=PER_RANK,
        dp_rank=world.dp_rank,
        dp_size=world.dp_size,
    )
    step = TrainStep(
        model=parallel.model,
        objective=Regression(),
        optimizers=adamw(model=parallel.model, lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-3, weight_decay=0.1),
        sync=parallel.sync,
        precision=FP32,
        world=world,
        max_grad_norm=0.3,
    )
    positions, logged = [], []
    for number in (1, 2):
        window = loader.next_window()
        positions += [int(p) for microbatch in window.microbatches for p in microbatch["position"]]
        result = step(window, 1e-2, number)
        means, numbers = read_means(result.metrics, result.loss, result.grad_norm)
        logged += [*numbers, means["absolute"]]
    evaluation = Evaluation(
        model=parallel.model,
        evaluators={"held_out": HeldOut(objective=Regression(), data=data, per_gpu_batch_size=PER_RANK)},
        run=run_context(world=world),
        folder=Path(),
    )
    measured, _ = evaluation.measure(0, lambda what: None)
    weights = [full_tensor(parameter.detach()) for parameter in parallel.inner.parameters()]
    logged += [measured["val_loss"], measured["val_absolute"]]
    return positions, logged, [float(value) for weight in weights for value in weight.flatten()]


def train_in_pairs(world):
    """Train with data share k on the ranks 2k and 2k + 1."""
    from torch.distributed.device_mesh import init_device_mesh

    from foundry.parallel.process_group import arrange, with_mesh

    results = {}
    for name, config in CONFIGS.items():
        (data,) = config.mesh_shape(2)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(data, "context"))
        pairs = with_mesh(arrange(world, config), mesh)
        assert (pairs.dp_rank, pairs.dp_size, pairs.world_size) == (world.rank // 2, 2, 4)
        results[name] = train(pairs)
    grid = with_mesh(world, init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "context")))
    assert (grid.dp_rank, grid.dp_size) == (world.rank // 2, 2)
    return results


def test_paired_ranks_with_shared_data_train_as_one_process():
    import torch

    from foundry.parallel.process_group import World

    alone = World.single(torch.device("cpu"))
    assert isinstance(alone.distributed, Single)
    assert (alone.dp_rank, alone.dp_size) == (0, 1)
    read, logged, weights = train(alone)
    of_ranks = run_ranks(train_in_pairs, 4)
    for name in CONFIGS:
        shares = [results[name][0] for results in of_ranks]
        assert shares[0] == shares[1]
        assert shares[2] == shares[3]
        assert sorted(shares[0] + shares[2]) == sorted(read)
        for results in of_ranks:
            assert results[name][1] == pytest.approx(logged, rel=1e-5), name
            assert results[name][2] == pytest.approx(weights, abs=1e-6), name
