"""What both sides of a comparison measure of themselves: time and tokens of each step, and memory."""

import json
import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_MIB = 2**20


class Meter:
    """Times steps by the wall's and by this process's clock, and knows the memory from before the first one."""

    def __init__(self) -> None:
        self._times: list[tuple[float, float]] = []
        self._tokens: list[int] = []
        self._resident_mib = 0.0

    def start(self) -> None:
        """Model, data and optimizer are there; the first step comes next."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self._resident_mib = pages * os.sysconf("SC_PAGE_SIZE") / _MIB

    def step(self, tokens: int) -> None:
        """A step over so many tokens that are no padding is done."""
        self._times.append((time.perf_counter(), time.process_time()))
        self._tokens.append(tokens)

    def write(self, file: Path, num_warmup: int, **more: Sequence[float]) -> None:
        """Write what was measured, without the first `num_warmup` steps where it is about time."""
        (wall, cpu), (last_wall, last_cpu) = self._times[num_warmup - 1], self._times[-1]
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        measured: dict[str, Any] = {
            "tokens": sum(self._tokens[num_warmup:]),
            "wall_seconds": last_wall - wall,
            "cpu_seconds": last_cpu - cpu,
            "peak_mib": peak_mib,
            "grown_mib": peak_mib - self._resident_mib,
            "device_peak_mib": torch.cuda.max_memory_allocated() / _MIB if torch.cuda.is_available() else None,
            **more,
        }
        file.write_text(json.dumps(measured))
