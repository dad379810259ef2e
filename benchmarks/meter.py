"""Measurements that each side of a comparison takes in its own process: time and tokens of each step, and memory."""

import json
import os
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_MIB = 2**20


class Meter:
    """Meter of steps by wall time and by this process's CPU time, and of memory since before the first step."""

    def __init__(self) -> None:
        self._times: list[tuple[float, float]] = []
        self._tokens: list[int] = []
        self._resident_mib = 0.0
        self._prepared = (0.0, 0.0)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Context that times a pass over all samples before the first step, such as that of a reference model."""
        begin = _clocks()
        yield
        self._prepared = (_clocks()[0] - begin[0], _clocks()[1] - begin[1])

    def start(self) -> None:
        """Start the clock: model, data and optimizer exist, and the first step comes next."""
        self._times.append(_clocks())
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self._resident_mib = pages * os.sysconf("SC_PAGE_SIZE") / _MIB

    def step(self, tokens: int) -> None:
        """Record a finished step with this number of non-padding tokens."""
        self._times.append(_clocks())
        self._tokens.append(tokens)

    def write(self, file: Path, num_warmup: int, **more: Sequence[float]) -> None:
        """Write the measurements to a JSON file.

        Args:
            file: output file.
            num_warmup: number of first steps to exclude from tokens and seconds. 0 includes all steps, and adds the
                seconds of `preparing`.
            **more: further entries of the file.
        """
        (wall, cpu), (last_wall, last_cpu) = self._times[num_warmup], self._times[-1]
        prepared_wall, prepared_cpu = (0.0, 0.0) if num_warmup else self._prepared
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        measured: dict[str, Any] = {
            "tokens": sum(self._tokens[num_warmup:]),
            "wall_seconds": last_wall - wall + prepared_wall,
            "cpu_seconds": last_cpu - cpu + prepared_cpu,
            "prepared_cpu_seconds": self._prepared[1],
            "process_cpu_seconds": _cpu_seconds_with_children(),
            "peak_mib": peak_mib,
            "grown_mib": peak_mib - self._resident_mib,
            "device_peak_mib": torch.cuda.max_memory_allocated() / _MIB if torch.cuda.is_available() else None,
            **more,
        }
        file.write_text(json.dumps(measured))


def _clocks() -> tuple[float, float]:
    """Return wall time and CPU time of this process, in seconds."""
    return time.perf_counter(), time.process_time()


def _cpu_seconds_with_children() -> float:
    """Return the CPU time of this process since its start, imports included, and of its ended children."""
    usages = [resource.getrusage(scope) for scope in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
