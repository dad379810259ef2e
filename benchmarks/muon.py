"""Cost of Muon's update of sharded matrices: bytes and FLOPs of the busiest rank, CPU time of all ranks, and seconds.

"everywhere" is the earlier implementation, which gathers each matrix in fp32 and orthogonalizes it on every rank. "one
owner" is `foundry.optim.muon.Muon`. Both take the same steps with the same gradients, in turn, and must end bitwise
equal.

    OMP_NUM_THREADS=1 python benchmarks/muon.py [--ranks 4] [--replicas 1] [--width 512] [--layers 4] [--steps 5]
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from comparison import RESULT, join_ranks, run_ranks
from records import Column, Row, finish, parser
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from foundry.optim.muon import Muon, orthogonalise

COLUMNS = [
    Column(key="received", heading="MB received a rank", format=",.2f"),
    Column(key="flops", heading="GFLOP a rank, most", format=",.2f"),
    Column(key="cpu", heading="CPU s a step, all ranks", format=".3f", spread=True),
    Column(key="wall", heading="s a step", format=".3f", spread=True),
]
OPTIONS: dict[str, Any] = {"lr": 0.01, "momentum": 0.95, "nesterov": True, "ns_steps": 5, "weight_decay": 0.1}


class Received(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of the bytes that all-gathers and all-to-alls return on this rank."""

    num_bytes = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        if operator.name() == "_c10d_functional::all_gather_into_tensor":
            self.num_bytes += result.numel() * result.element_size()
        elif operator.name() == "c10d::alltoall_base_":
            self.num_bytes += args[0].numel() * args[0].element_size()
        return result


@torch.no_grad()
def everywhere(matrices: list[nn.Parameter], momentum: list[Tensor], dtype: torch.dtype) -> None:
    """Take one step; each rank gathers and orthogonalizes all matrices."""
    for matrix, buffer in zip(matrices, momentum, strict=True):
        assert isinstance(matrix, DTensor)
        assert isinstance(matrix.grad, DTensor)
        weight, grad = matrix.to_local(), matrix.grad.to_local()
        buffer.lerp_(grad, 1 - OPTIONS["momentum"])
        mesh, placements = matrix.device_mesh, matrix.placements
        ahead = grad.lerp(buffer, OPTIONS["momentum"])
        part = DTensor.from_local(ahead, mesh, placements, run_check=False, shape=matrix.shape, stride=matrix.stride())
        direction = orthogonalise(part.full_tensor(), OPTIONS["ns_steps"], dtype)
        full_direction = DTensor.from_local(direction, mesh, [Replicate()] * mesh.ndim, run_check=False)
        rate = OPTIONS["lr"] * 0.2 * max(matrix.shape) ** 0.5
        decayed = weight.float() * (1 - OPTIONS["lr"] * OPTIONS["weight_decay"])
        weight.copy_(decayed.add_(full_direction.redistribute(placements=placements).to_local(), alpha=-rate))


def measure(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    """Measure on one rank; rank 0 writes the results of all ranks."""
    join_ranks(rank, arguments.ranks, folder)
    shape = (arguments.replicas, arguments.ranks // arguments.replicas)
    mesh = init_device_mesh("cpu", shape if arguments.replicas > 1 else shape[1:])
    layout = [Replicate(), Shard(0)] if arguments.replicas > 1 else [Shard(0)]
    width, dtype = arguments.width, getattr(torch, arguments.dtype)
    hidden = width * 11 // 4
    attention = [(width, width), (width // 4, width), (width // 4, width), (width, width)]
    shapes = [*attention, (hidden, width), (hidden, width), (width, hidden)] * arguments.layers
    torch.manual_seed(0)
    initial_values = [torch.randn(each) for each in shapes]
    sides = [[nn.Parameter(distribute_tensor(each, mesh, layout)) for each in initial_values] for _ in range(2)]
    momentum = [torch.zeros_like(each.to_local()) for each in sides[0] if isinstance(each, DTensor)]
    optimizer = Muon(sides[1], **OPTIONS, ns_dtype=dtype)
    steps: dict[str, Callable[[], object]] = {
        "everywhere": lambda: everywhere(sides[0], momentum, dtype),
        "one owner": optimizer.step,
    }
    seconds: dict[str, list[list[float]]] = {name: [] for name in steps}
    counts: dict[str, tuple[int, int]] = {}
    for step in range(arguments.steps + 1):
        grads = [distribute_tensor(torch.randn(each), mesh, layout) for each in shapes]
        for (name, take), matrices in zip(steps.items(), sides, strict=True):
            for matrix, grad in zip(matrices, grads, strict=True):
                matrix.grad = grad
            dist.barrier()
            start = time.perf_counter(), time.process_time()
            if step == 0:  # bytes and FLOPs are counted in one untimed step, since counting takes time
                with Received() as received, FlopCounterMode(display=False) as flops:  # type: ignore[no-untyped-call]
                    take()
                counts[name] = received.num_bytes, flops.get_total_flops()
                continue
            take()
            dist.barrier()
            seconds[name].append([time.perf_counter() - start[0], time.process_time() - start[1]])
    equal = all(torch.equal(first.to_local(), other.to_local()) for first, other in zip(*sides, strict=True))
    everyone: list[Any] = [None] * arguments.ranks
    dist.all_gather_object(everyone, (equal, counts, seconds))
    if rank == 0:
        assert all(each[0] for each in everyone), "ranks or ways end with other bits"
        times = dict[str, dict[str, list[float]]]()
        for name in steps:
            samples = torch.tensor([each[2][name] for each in everyone])  # (ranks, steps, 2)
            times[name] = {
                "received": [max(each[1][name][0] for each in everyone) / 1e6],
                "flops": [max(each[1][name][1] for each in everyone) / 1e9],
                "cpu": samples[..., 1].sum(0).tolist(),
                "wall": samples[..., 0].amax(0).tolist(),
            }
        Path(folder, RESULT).write_text(json.dumps([sum(map(Tensor.numel, initial_values)), times]))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    cli = parser(__doc__)
    for name, default in (("ranks", 4), ("replicas", 1), ("width", 512), ("layers", 4), ("steps", 5)):
        cli.add_argument(f"--{name}", type=int, default=default)
    cli.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    options = cli.parse_args()
    if options.smoke:
        options.width, options.layers, options.steps = 32, 1, 1
    num_parameters, times = run_ranks(measure, options, options.ranks)
    layout = (
        f"FSDP2 x {options.ranks}"
        if options.replicas == 1
        else f"HSDP {options.replicas} x {options.ranks // options.replicas}"
    )
    rows = [Row(case=f"{layout}, {options.dtype}", side=name, values=values) for name, values in times.items()]
    notes = [f"{num_parameters:,} parameters. Both ways end with equal bits on all ranks."]
    finish(options, case="layout", side="way", columns=COLUMNS, rows=rows, notes=notes)


if __name__ == "__main__":
    main()
