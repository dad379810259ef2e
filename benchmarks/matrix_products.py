"""Peak of this machine's matrix products in FLOP/s, in a process of its own; see throughput.py.

    python benchmarks/matrix_products.py JOB.json

The peak is the largest rate among products of square matrices of several sizes, each repeated for some time.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

SIZES = (512, 1024, 2048)
SMOKE_SIZES = (256,)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measure_rate(size: int, dtype: torch.dtype, seconds: float) -> float:
    """Return the largest FLOP/s of one product of two matrices of `size` rows and columns, repeated for `seconds`."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator).to(dtype) for _ in range(2))
    result, shortest = torch.empty(size, size, dtype=dtype), float("inf")
    torch.mm(left, right, out=result)
    end = time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        torch.mm(left, right, out=result)
        shortest = min(shortest, time.perf_counter() - begin)
    return 2 * size**3 / shortest


def main(file: Path) -> None:
    """Measure the peak of a job with `precision`, `sizes` and `seconds` for each size, and write it as `peak`."""
    job: dict[str, Any] = json.loads(file.read_text())
    peak = max(measure_rate(size, DTYPES[job["precision"]], job["seconds"]) for size in job["sizes"])
    Path(job["measured"]).write_text(json.dumps({"peak": peak}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
