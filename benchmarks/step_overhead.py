"""Time that foundry adds to an optimizer step: a plain PyTorch loop and Trainer, TrainStep and Loader, step by step.

The model is a small MLP on one thread, so that its own time does not hide the overhead. Both sides read the same
samples in the same order, clip, and take the same AdamW updates; foundry has no observer and logs nothing in between.
Blocks of both sides alternate in one process, and their losses are compared after the first block. Only steps within
blocks are timed, one by one.

    OMP_NUM_THREADS=1 python benchmarks/step_overhead.py [--microbatches 1] [--profile]
"""

import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from records import Column, Headline, Row, finish, parser
from torch import Tensor, nn

from foundry.checkpoint.saver import NoCheckpoints
from foundry.config.schemas.checkpoint import KeepBest
from foundry.config.schemas.precision import PrecisionMode
from foundry.core.batch_sizes import BatchSizes
from foundry.core.duration import Budget
from foundry.core.progress import Progress
from foundry.core.protocols import LossSum, Microbatch, Objective, Window
from foundry.data.dataset import Dataset
from foundry.data.loader import Loader
from foundry.data.order import GlobalOrder
from foundry.optim.optimizers import adamw
from foundry.optim.schedules import Constant
from foundry.parallel.gradient_sync import LocalSync
from foundry.parallel.precision import PrecisionPolicy
from foundry.parallel.process_group import World
from foundry.parallel.rank_flags import RankFlags
from foundry.parallel.watchdog import Watchdog
from foundry.training.best import Best
from foundry.training.compiling import Recompilations
from foundry.training.signals import SignalHandler
from foundry.training.step import StepResult, TrainStep
from foundry.training.throughput import Throughput
from foundry.training.trainer import Trainer

SAMPLES, FEATURES, WIDTH, BATCH, LR, CLIP = 4096, 64, 256, 32, 1e-3, 1.0
BLOCK_STEPS, BLOCKS, WARMUP_BLOCKS = 200, 20, 2
COLUMNS = [
    Column(key="p10", heading="ms a step, p10", format=".3f"),
    Column(key="p50", heading="ms a step, p50", format=".3f"),
]
ADAMW: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01}


class Points(Dataset):
    """Dataset of a linear map that reads whole microbatches, as foundry's own datasets do."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(SAMPLES, FEATURES, generator=generator)
        self.y = self.x @ torch.randn(FEATURES, 1, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        return {"x": self.x[indices], "y": self.y[indices]}


class SquaredError(Objective):
    def num_valid(self, microbatch: Microbatch) -> int:
        return len(microbatch["x"])

    def loss(self, model: nn.Module, microbatch: Microbatch) -> LossSum:
        return LossSum((model(microbatch["x"]) - microbatch["y"]).square().sum())


def build_mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))


def build_raw_step(points: Points, microbatches: int) -> Callable[[], Tensor]:
    """Return a function that takes a step of a plain training loop; the sample order is computed once per epoch."""
    model = build_mlp()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.01},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8, fused=True)
    parameters = list(model.parameters())
    size = BATCH // microbatches
    position, order, epoch = 0, build_order(), 0
    indices = order._permutation(0).tolist()

    def step() -> Tensor:
        nonlocal position, epoch, indices
        if position == SAMPLES:
            position, epoch = 0, epoch + 1
            indices = order._permutation(epoch).tolist()
        total = torch.zeros(())
        for start in range(position, position + BATCH, size):
            batch = indices[start : start + size]
            loss = (model(points.x[batch]) - points.y[batch]).square().sum() / BATCH
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        position += BATCH
        return total

    return step


def build_order() -> GlobalOrder:
    return GlobalOrder(num_samples=SAMPLES, fingerprint="points", seed=0)


class Remembering(TrainStep):
    """Step that keeps its last result."""

    last: StepResult

    def __call__(
        self, window: Window, lr: float, step: int, *, weight_decay: float | None = None, momentum: float | None = None
    ) -> StepResult:
        self.last = super().__call__(window, lr, step, weight_decay=weight_decay, momentum=momentum)
        return self.last


def build_foundry_step(points: Points, microbatches: int) -> Callable[[], Tensor]:
    """Return a function that takes a step of foundry's trainer, without observers, evaluations and checkpoints."""
    world = World.single(torch.device("cpu"))
    policy = PrecisionPolicy(PrecisionMode.fp32)
    model = build_mlp()
    steps = (BLOCKS + WARMUP_BLOCKS) * BLOCK_STEPS + 1  # so that no block has the final step
    budget = Budget(total_samples=steps * BATCH, batch_sizes=BatchSizes.constant(BATCH), samples_per_epoch=SAMPLES)
    trainer = Trainer(
        step=Remembering(
            model=model,
            objective=SquaredError(),
            optimizers=adamw(model=model, lr=LR, **ADAMW),
            sync=LocalSync(),
            precision=policy,
            world=world,
            max_grad_norm=CLIP,
        ),
        source=Loader(
            dataset=points,
            order=build_order(),
            batch_size_at=lambda samples: BATCH,
            per_gpu_batch_size=BATCH // microbatches,
        ),
        schedule=Constant.from_durations(budget=budget, max_lr=LR, warmup="0", horizon="1.0"),
        constant_weight_decay=ADAMW["weight_decay"],
        progress=Progress(samples_per_epoch=SAMPLES, tokens_per_sample=None),
        budget=budget,
        max_seconds=None,
        world=world,
        throughput=Throughput(world_size=1, device=world.device, precision=PrecisionMode.fp32),
        watchdog=Watchdog(600.0, 0),
        log_every_n_steps=steps,
        evaluation_interval=None,
        evaluation=cast(Any, None),  # not called, since the budget is never reached
        metric=None,
        stop_rules={},
        best=Best(KeepBest(), None),
        checkpoints=NoCheckpoints(),
        rank_flags=RankFlags(world),
        signals=SignalHandler(),
        ema=None,
        max_rollbacks=0,
        save_final=False,
        explain_out_of_memory=lambda error, step: str(error),
        profiler=None,
        recompilations=Recompilations(is_compiled=False),
    )

    def step() -> Tensor:
        trainer._advance()
        return cast(Remembering, trainer.step).last.loss

    return step


def time_block(step: Callable[[], Tensor]) -> tuple[list[float], float]:
    """Return the milliseconds of each step of a block, and the last loss."""
    clock, times = time.perf_counter, []
    for _ in range(BLOCK_STEPS):
        begin = clock()
        loss = step()
        times.append((clock() - begin) * 1e3)
    return times, loss.item()


def quantiles(times: list[float]) -> tuple[float, float]:
    deciles = statistics.quantiles(times, n=10)
    return deciles[0], deciles[4]


def main() -> None:
    cli = parser(__doc__)
    cli.add_argument("--microbatches", type=int, default=1)
    cli.add_argument("--profile", action="store_true", help="profile foundry's steps instead")
    options = cli.parse_args()
    blocks = 1 if options.smoke else BLOCKS
    torch.set_num_threads(1)
    points = Points()
    sides = {
        "PyTorch loop": build_raw_step(points, options.microbatches),
        "foundry": build_foundry_step(points, options.microbatches),
    }
    if options.profile:
        time_block(sides["foundry"])
        with cProfile.Profile() as profile:
            for _ in range(5):
                time_block(sides["foundry"])
        pstats.Stats(profile).sort_stats("tottime").print_stats("foundry", 40)
        return
    times: dict[str, list[float]] = {name: [] for name in sides}
    for block in range(blocks + WARMUP_BLOCKS):
        losses = []
        for name, step in sides.items():
            block_times, loss = time_block(step)
            losses.append(loss)
            if block >= WARMUP_BLOCKS:
                times[name] += block_times
        if block == 0:  # in later blocks, rounding differences have grown
            assert abs(losses[0] - losses[1]) <= 1e-3 * losses[0], f"the two sides do not train alike: {losses}"
    percentiles = {name: quantiles(values) for name, values in times.items()}
    difference = tuple(b - a for a, b in zip(*percentiles.values(), strict=True))
    rows = [
        Row(side=name, values={"p10": [p10], "p50": [p50]})
        for name, (p10, p50) in {**percentiles, "difference": difference}.items()
    ]
    loop, foundry = (values[1] for values in percentiles.values())
    headlines = [
        Headline(
            what="An optimizer step of a tiny model without trackers, median",
            foundry=f"{foundry:.3f} ms, {1e3 * difference[1]:.0f} µs more than the loop",
            beside=f"{loop:.3f} ms PyTorch loop",
        )
    ]
    size = BATCH // options.microbatches
    notes = [
        f"{blocks * BLOCK_STEPS:,} steps of each side, {options.microbatches} x {size} samples a step, one thread."
    ]
    finish(options, columns=COLUMNS, rows=rows, notes=notes, chart="p50", headlines=headlines)


if __name__ == "__main__":
    main()
