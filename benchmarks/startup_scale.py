"""Time and memory until one of many ranks has its shards of a large model.

    python benchmarks/startup_scale.py [CASE...]

Each case is a process that is one rank of the given number, with torch's `fake` backend for the other ranks. It wraps
the model with FSDP2, then allocates and initializes its shards. `wrapped` allocates nothing. `whole` first builds the
model with its weights and then wraps it, which is necessary for a model without `initial_weights()`.
"""

import json
import resource
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

from records import Column, Row, finish, parser

COLUMNS = [
    Column(key="seconds", heading="seconds", format=".1f"),
    Column(key="held_mib", heading="its shards, MiB"),
    Column(key="peak_mib", heading="peak above imports, MiB"),
]
SIZES = {
    "0.15B": (1024, 2816, 12, 8, 8, 512),
    "1.2B": (2048, 5632, 22, 16, 8, 32000),
    "8B": (4096, 14336, 32, 32, 8, 128256),
    "70B": (8192, 28672, 80, 64, 8, 128256),
}
"""Width, width of the feed-forward, blocks, heads, key and value heads, vocabulary."""

CASES = {
    "70B wrapped 256": "70B, rank 0 of 256, on the meta device",
    "70B drawn 256": "70B, rank 0 of 256",
    "8B drawn 8": "8B, rank 0 of 8",
    "1.2B drawn 2": "1.2B, rank 0 of 2",
    "1.2B whole 2": "1.2B, rank 0 of 2, built whole",
    "0.15B drawn 2": "0.15B, rank 0 of 2",
    "0.15B whole 2": "0.15B, rank 0 of 2, built whole",
}
_MIB = 2**20


def measure(size: str, how: str, ranks: int) -> dict[str, float]:
    """Return the seconds until rank 0 is ready, the MiB of its shards, and its peak in MiB, all without imports."""
    from unittest.mock import patch

    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard  # noqa: F401 # imported before the clock starts
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from foundry.commands.library import compose
    from foundry.core.sharded import local_part
    from foundry.models.initialisation import InitialModel
    from foundry.parallel import wrap
    from foundry.parallel.precision import PrecisionPolicy
    from foundry.parallel.process_group import World, arrange
    from foundry.parts.model import start_model

    names = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "vocab_size")
    words = [f"model.{name}={number}" for name, number in zip(names, SIZES[size], strict=True)]
    # A configuration can start the ranks of one node only; the mesh sets the number of ranks that share the model.
    config = compose([*words, f"data.vocab_size={SIZES[size][-1]}", "distributed=fsdp", "tracking=none"])
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    world = arrange(World(0, 0, ranks, ranks, torch.device("cpu")), config.distributed)
    before, began = _resident_mib(), time.perf_counter()
    initial = start_model(config)
    if how == "whole":
        initial = InitialModel(initial.materialize())
    is_empty = how == "wrapped"
    policy = PrecisionPolicy(config.precision.mode)
    with patch.object(wrap, "allocate") if is_empty else nullcontext():
        parallel = wrap.parallelize(
            policy.prepare(initial.model),
            policy,
            world,
            grad_checkpointing=False,
            torchcompile=False,
            fill=None if is_empty else initial.fill,
        )
    seconds = time.perf_counter() - began
    shard_bytes = sum(local_part(p).nbytes for p in parallel.model.parameters() if not p.is_meta)
    peak_mib = _peak_resident_mib() - before
    return {"seconds": seconds, "held_mib": shard_bytes / _MIB, "peak_mib": peak_mib}


def _resident_mib() -> float:
    """Return the current resident memory, about the peak so far, since nothing large has been freed."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / _MIB


def _peak_resident_mib() -> float:
    """Return the peak resident memory of this process; `ru_maxrss` would include the peak of its parent process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def main() -> None:
    """Measure each case in its own process."""
    cli = parser(__doc__)
    cli.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE", help=", ".join(CASES))
    cli.add_argument("--one", metavar="CASE", help="the process that is measured")
    options = cli.parse_args()
    if options.one:
        size, how, ranks = options.one.split()
        print(json.dumps(measure(size, how, int(ranks))))
        return
    rows = list[Row]()
    for case in ["70B wrapped 256"] if options.smoke else options.cases:
        command = [sys.executable, __file__, "--one", case]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        measurements = json.loads(printed.splitlines()[-1])
        rows.append(Row(side=CASES.get(case, case), values={key: [value] for key, value in measurements.items()}))
    finish(options, side="start", columns=COLUMNS, rows=rows, chart="peak_mib")


if __name__ == "__main__":
    main()
