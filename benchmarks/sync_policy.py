"""Cost of `distributed.gradient_sync`: bytes and seconds of a window of microbatches, under DDP and FSDP2.

Every rank is a process. The sides take turns, and each round builds all of them from the same weights and reads the
same tokens. "PyTorch" is `no_sync` of DistributedDataParallel, or `set_requires_gradient_sync` of `fully_shard` (one
unit per block), in a plain loop around the same model. In "no exchange" ranks train independently, which is the minimum
time of a window. Losses are compared before times are shown. Bytes are the traffic that a rank would receive if each
collective used the ring algorithm: (n - 1) / n of the gathered or scattered bytes over n ranks, twice that for
all-reduced bytes. An untimed window counts them. The backend is gloo on CPUs, and NCCL if there are as many GPUs as
ranks.

    OMP_NUM_THREADS=1 python benchmarks/sync_policy.py [--ranks 2] [--microbatches 4] [--steps 6] [--rounds 3]
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from comparison import RESULT, Measured, in_turn, join_ranks, losses_apart, run_ranks
from language_model import Shape
from records import Column, Headline, Row, finish, parser
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from foundry.config.schemas.distributed import DDP, FSDP, Distributed, GradientSync, Single
from foundry.config.schemas.precision import PrecisionMode
from foundry.core.protocols import Microbatch, Window
from foundry.models.transformer import Transformer
from foundry.objectives.next_token import NextToken
from foundry.optim.optimizers import adamw
from foundry.parallel.precision import PrecisionPolicy
from foundry.parallel.process_group import World, arrange
from foundry.parallel.wrap import parallelize
from foundry.training.step import TrainStep

LR, ROWS = 1e-3, 2
STRATEGIES: dict[str, type[Distributed]] = {"ddp": DDP, "fsdp": FSDP}
WAYS: dict[str, dict[str, tuple[str, ...]]] = {
    "foundry": {"ddp": ("every", "last"), "fsdp": ("every", "last", "last_keep_params")},
    "PyTorch": {"ddp": ("every", "last"), "fsdp": ("every", "last")},
}
NONE = "none"
COLUMNS = [
    Column(key="received", heading="MB received a rank", format=",.1f"),
    Column(key="collectives", heading="collectives"),
    Column(key="wall", heading="s a window", format=".3f", spread=True),
    Column(key="cpu", heading="CPU s a window", format=".3f", spread=True),
    Column(key="apart", heading="losses apart", format=".1e"),
]

TakeStep = Callable[[list[Microbatch], int], Tensor]
"""One optimizer step, given this rank's microbatches and the step's number; returns the mean loss over all ranks."""


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of this rank's collectives, and of the bytes that it would receive if each used the ring algorithm."""

    def __init__(self, ranks: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.received, self.collectives, self._share = 0.0, 0, (ranks - 1) / ranks

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator.name()
        if name == "c10d::allreduce_":
            self._note(2 * sum(each.numel() * each.element_size() for each in args[0]))
        elif name in {"c10d::_allgather_base_", "c10d::_reduce_scatter_base_"}:
            self._note(max(each.numel() * each.element_size() for each in args[:2]))
        return operator(*args, **(kwargs or {}))

    def _note(self, num_bytes: int) -> None:
        self.received += num_bytes * self._share
        self.collectives += 1


@dataclass(frozen=True)
class Rank:
    """Settings that all sides share on one rank.

    Attributes:
        shape: shape of the model.
        num_microbatches: microbatches of a window.
        precision: bf16 with autocast on a GPU, fp32 on a CPU.
    """

    world: World
    shape: Shape
    num_microbatches: int
    precision: PrecisionMode

    def model(self) -> nn.Module:
        """Return the model with the same weights each time."""
        torch.manual_seed(0)
        return Transformer(**vars(self.shape)).to(self.world.device)

    def microbatches(self, step: int) -> list[Microbatch]:
        """Return this rank's microbatches of random tokens, which depend only on step and rank."""
        generator = torch.Generator().manual_seed(1000 * step + self.world.rank)
        size = ROWS, self.shape.max_seq_len + 1
        tokens = [torch.randint(self.shape.vocab_size, size, generator=generator) for _ in range(self.num_microbatches)]
        rows = [each.to(self.world.device) for each in tokens]
        position = torch.arange(ROWS)
        return [{"tokens": row[:, :-1], "targets": row[:, 1:], "position": position} for row in rows]


def build_own(rank: Rank, strategy: str, policy: str) -> TakeStep:
    """Return foundry's step; with the strategy "none", every rank trains independently."""
    world, precision = rank.world, PrecisionPolicy(rank.precision)
    if strategy == NONE:
        world = arrange(World.single(world.device), Single())
    else:
        config = STRATEGIES[strategy](gradient_sync=GradientSync(policy))
        world = arrange(
            World(world.rank, world.local_rank, world.world_size, world.local_world_size, world.device), config
        )
    model = rank.model()
    precision.prepare(model)
    parallel = parallelize(model, precision, world, grad_checkpointing=False, torchcompile=False)
    step = TrainStep(
        model=parallel.model,
        objective=NextToken(),
        optimizers=adamw(model=parallel.model, lr=LR, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0),
        sync=parallel.sync,
        precision=precision,
        world=world,
        max_grad_norm=None,
    )
    return lambda microbatches, number: (
        step(Window(microbatches, ROWS * len(microbatches) * world.dp_size), LR, number).loss
    )


def build_plain(rank: Rank, strategy: str, policy: str) -> TakeStep:
    """Return the step of a plain loop around DistributedDataParallel or `fully_shard`."""
    module: nn.Module = rank.model()
    objective, count = NextToken(), rank.num_microbatches * ROWS * rank.shape.max_seq_len
    if strategy == "ddp":
        module = DistributedDataParallel(module, gradient_as_bucket_view=True)
    else:
        for block in module.model.layers:  # type: ignore[union-attr]
            fully_shard(block)
        fully_shard(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step(microbatches: list[Microbatch], number: int) -> Tensor:
        total = torch.zeros((), device=rank.world.device)
        for index, microbatch in enumerate(microbatches, 1):
            reduces = policy == "every" or index == len(microbatches)
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(reduces)
            deferred = isinstance(module, DistributedDataParallel) and not reduces
            autocast = torch.autocast(
                rank.world.device.type, torch.bfloat16, enabled=rank.precision is not PrecisionMode.fp32
            )
            with module.no_sync() if deferred else nullcontext(), autocast:  # type: ignore[operator]
                loss = objective.loss(module, microbatch).loss / count
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        return total / rank.world.world_size

    return step


BUILD = {"foundry": build_own, "PyTorch": build_plain}


def ways() -> Iterator[str]:
    """Yield side, strategy and policy of each way to measure, separated by spaces."""
    yield f"foundry {NONE} {NONE}"
    for strategy in STRATEGIES:
        for side, policies in WAYS.items():
            yield from (f"{side} {strategy} {policy}" for policy in policies[strategy])


def measure(rank: Rank, way: str, steps: int) -> Measured:
    """Measure one way in one round: traffic of the first window, median seconds from the third on, and all losses."""
    side, strategy, policy = way.split()
    take, traffic = BUILD[side](rank, strategy, policy), Traffic(rank.world.world_size)
    with traffic:
        losses = [take(rank.microbatches(0), 1)]
    losses.append(take(rank.microbatches(1), 2))
    seconds = list[tuple[float, float]]()
    for number in range(2, steps + 2):
        window = rank.microbatches(number)
        _wait(rank.world)
        wall, cpu = time.perf_counter(), time.process_time()
        losses.append(take(window, number + 1))
        _wait(rank.world)
        seconds.append((time.perf_counter() - wall, time.process_time() - cpu))
    wall_seconds, cpu_seconds = (median(each) for each in zip(*seconds, strict=True))
    return {
        "losses": [loss.item() for loss in losses],
        "received": traffic.received,
        "collectives": traffic.collectives,
        "wall_seconds": wall_seconds,
        "cpu_seconds": cpu_seconds,
    }


def _wait(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    world.barrier()


def run_rank(number: int, options: argparse.Namespace, folder: str) -> None:
    """Measure all ways on one rank; rank 0 writes the results."""
    cuda = _has_gpus(options.ranks)
    device = torch.device("cuda", number) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    join_ranks(number, options.ranks, folder, "nccl" if cuda else "gloo")
    world = World(number, number, options.ranks, options.ranks, device)
    precision = PrecisionMode.amp_bfloat16 if cuda else PrecisionMode.fp32
    rank = Rank(world, shape(options), options.microbatches, precision)
    measurements = in_turn(list(ways()), options.rounds, lambda way, _: measure(rank, way, options.steps))
    if number == 0:
        Path(folder, RESULT).write_text(json.dumps(measurements))
    world.barrier()
    dist.destroy_process_group()


def shape(options: argparse.Namespace) -> Shape:
    """Return the shape of the model."""
    width = options.width
    return Shape(
        hidden_size=width, intermediate_size=width * 11 // 4, num_layers=options.layers, max_seq_len=options.seq_len
    )


def _has_gpus(ranks: int) -> bool:
    return torch.cuda.is_available() and torch.cuda.device_count() >= ranks


def main() -> None:
    """Compare the sides."""
    cli = parser(__doc__)
    sizes = {"ranks": 2, "microbatches": 4, "steps": 6, "rounds": 3, "width": 256, "layers": 4, "seq_len": 128}
    for name, default in sizes.items():
        cli.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    options = cli.parse_args()
    if options.smoke:
        options.steps, options.rounds, options.width, options.layers, options.seq_len = 1, 1, 32, 1, 16
    measurements: dict[str, list[Measured]] = run_ranks(run_rank, options, options.ranks)
    alone = measurements.pop(f"foundry {NONE} {NONE}")
    apart: dict[str, float | None] = {**losses_apart(measurements), f"foundry {NONE} {NONE}": None}
    rows = list[Row]()
    for way, runs in {f"foundry {NONE} {NONE}": alone, **measurements}.items():
        side, strategy, policy = way.split()
        difference = apart[way]
        values = {
            "received": [runs[0]["received"] / 1e6],
            "collectives": [runs[0]["collectives"]],
            "wall": [run["wall_seconds"] for run in runs],
            "cpu": [run["cpu_seconds"] for run in runs],
            "apart": None if difference is None else [difference],
        }
        rows.append(Row(case=strategy, side=f"{side}, {policy}" if strategy != NONE else "no exchange", values=values))
    last, every, peer_last, peer_every = (
        f"{measurements[f'{side} fsdp {policy}'][0]['received'] / 1e6:,.0f}"
        for side in ("foundry", "PyTorch")
        for policy in ("last", "every")
    )
    headlines = [
        Headline(
            what=f"Bytes a rank receives a step, FSDP2 x {options.ranks}, {options.microbatches} microbatches",
            foundry=f"{last} MB with gradient_sync=last, {every} with every",
            beside=f"{peer_last} and {peer_every} MB PyTorch's own calls",
        )
    ]
    notes = [f"{options.microbatches} microbatches of {ROWS} rows of {options.seq_len} tokens a window and rank."]
    finish(options, case="strategy", columns=COLUMNS, rows=rows, notes=notes, chart="wall", headlines=headlines)


if __name__ == "__main__":
    main()
