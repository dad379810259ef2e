"""What Muon's update of sharded matrices costs: bytes received, FLOPs of the iterations and seconds, by rank.

"everywhere" is how it was done before: each matrix gathered in fp32 and orthogonalised on every rank. "one owner" is
`foundry.optim.muon.Muon`. Both take the same steps on the same gradients, in turn, and must end with equal bits.

    OMP_NUM_THREADS=1 python benchmarks/muon.py [--ranks 4] [--replicas 1] [--width 512] [--layers 4] [--steps 5]
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from foundry.optim.muon import Muon, orthogonalise

OPTIONS: dict[str, Any] = {"lr": 0.01, "momentum": 0.95, "nesterov": True, "ns_steps": 5, "weight_decay": 0.1}


class Received(TorchDispatchMode):
    """Bytes of what collectives put out on this rank."""

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
    """One step in which each rank gathers and orthogonalises all matrices."""
    for matrix, buffer in zip(matrices, momentum, strict=True):
        assert isinstance(matrix, DTensor)
        assert isinstance(matrix.grad, DTensor)
        weight, grad = matrix.to_local(), matrix.grad.to_local()
        buffer.lerp_(grad, 1 - OPTIONS["momentum"])
        mesh, placements = matrix.device_mesh, matrix.placements
        ahead = grad.lerp(buffer, OPTIONS["momentum"])
        part = DTensor.from_local(ahead, mesh, placements, run_check=False, shape=matrix.shape, stride=matrix.stride())
        direction = orthogonalise(part.full_tensor(), OPTIONS["ns_steps"], dtype)
        whole = DTensor.from_local(direction, mesh, [Replicate()] * mesh.ndim, run_check=False)
        rate = OPTIONS["lr"] * 0.2 * max(matrix.shape) ** 0.5
        decayed = weight.float() * (1 - OPTIONS["lr"] * OPTIONS["weight_decay"])
        weight.copy_(decayed.add_(whole.redistribute(placements=placements).to_local(), alpha=-rate))


def measure(rank: int, arguments: argparse.Namespace, store: str) -> None:
    """What one rank does; rank 0 prints the table."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=arguments.ranks)
    shape = (arguments.replicas, arguments.ranks // arguments.replicas)
    mesh = init_device_mesh("cpu", shape if arguments.replicas > 1 else shape[1:])
    layout = [Replicate(), Shard(0)] if arguments.replicas > 1 else [Shard(0)]
    width, dtype = arguments.width, getattr(torch, arguments.dtype)
    hidden = width * 11 // 4
    attention = [(width, width), (width // 4, width), (width // 4, width), (width, width)]
    shapes = [*attention, (hidden, width), (hidden, width), (width, hidden)] * arguments.layers
    torch.manual_seed(0)
    drawn = [torch.randn(each) for each in shapes]
    sides = [[nn.Parameter(distribute_tensor(each, mesh, layout)) for each in drawn] for _ in range(2)]
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
            if step == 0:  # what it counts costs time of its own
                with Received() as received, FlopCounterMode(display=False) as flops:
                    take()
                counts[name] = received.num_bytes, flops.get_total_flops()
                continue
            take()
            dist.barrier()
            seconds[name].append([time.perf_counter() - start[0], time.process_time() - start[1]])
    equal = all(torch.equal(one.to_local(), other.to_local()) for one, other in zip(*sides, strict=True))  # type: ignore[operator]
    everyone: list[Any] = [None] * arguments.ranks
    dist.all_gather_object(everyone, (equal, counts, seconds))
    if rank == 0:
        print(f"torch {torch.__version__}, {arguments}: {sum(map(Tensor.numel, drawn)):,} parameters")
        print(f"equal bits on all ranks: {all(each[0] for each in everyone)}")
        print("| | MB received a rank | GFLOP a rank, most | CPU s a step, all ranks | wall s a step |")
        print("|---|---|---|---|---|")
        for name in steps:
            megabytes = max(each[1][name][0] for each in everyone) / 1e6
            gigaflops = max(each[1][name][1] for each in everyone) / 1e9
            taken = torch.tensor([each[2][name] for each in everyone])  # (ranks, steps, 2)
            wall, cpu = taken[..., 0].amax(0).median().item(), taken[..., 1].sum(0).median().item()
            print(f"| {name} | {megabytes:.2f} | {gigaflops:.2f} | {cpu:.3f} | {wall:.3f} |")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 4), ("replicas", 1), ("width", 512), ("layers", 4), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (arguments, f"{folder}/store"), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
