"""Helpers for tests that run on the CPU and on a GPU, records of device operations, and fake GPUs."""

from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foundry.parallel import device
from foundry.parallel.process_group import World

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
"""For `parametrize`: GPU tests run on the CPU too, so that their code is tested without a GPU."""


def device_of(name):
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def alone_on(name):
    """Return the World of a single process on a device."""
    return World.single(device_of(name))


class Operations(TorchDispatchMode):
    """Records the dispatched operations with the dtype of their outputs."""

    _READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero")

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        self.seen.append((function.name(), getattr(output, "dtype", None)))
        return output

    @property
    def names(self):
        return [name for name, _ in self.seen]

    @property
    def num_reads(self):
        """Number of host reads of tensor values, on any device."""
        return sum(name in self._READS for name in self.names)


@contextmanager
def waiting_is_an_error(name):
    """Raise an error if the body waits for the GPU; no effect on the CPU."""
    if name != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def runs_on(name, monkeypatch):
    """With `cpu`, make runs in the body use the CPU even if the machine has a GPU; with `cuda`, change nothing."""
    with monkeypatch.context() as patch:
        if name == "cpu":
            patch.setattr(torch.cuda, "is_available", lambda: False)
            patch.setattr(device, "gpu_files", list)
        yield


@dataclass
class FakeGpus:
    """Fake answers of torch.cuda; all GPUs have equal memory, in bytes."""

    name: str = "NVIDIA H100 80GB HBM3"
    count: int = 1
    total: int = 80 * 2**30
    free: int = 79 * 2**30
    allocated: int = 0
    peak: int = 0
    reserved: int = 0
    num_retries: int = 0
    num_waits: int = 0

    def replace_torchs(self, monkeypatch):
        """Patch torch.cuda to answer with the current attributes of this object; nothing can compute on these GPUs."""
        answers = {
            "is_available": lambda: self.count > 0,
            "device_count": lambda: self.count,
            "set_device": lambda device: None,
            "get_device_name": lambda device=None: self.name,
            "mem_get_info": lambda device=None: (self.free, self.total),
            "memory_allocated": lambda device=None: self.allocated,
            "memory_reserved": lambda device=None: self.reserved,
            "max_memory_allocated": lambda device=None: self.peak,
            "memory_stats": lambda device=None: {
                "allocated_bytes.all.current": self.allocated,
                "allocated_bytes.all.peak": self.peak,
                "reserved_bytes.all.current": self.reserved,
                "num_alloc_retries": self.num_retries,
            },
            "max_memory_reserved": lambda device=None: self.reserved,
            "reset_peak_memory_stats": self._reset_peak,
            "reset_accumulated_memory_stats": self._reset_counts,
            "synchronize": self._wait,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        return self

    def _reset_peak(self, device=None):
        self.peak = self.allocated

    def _reset_counts(self, device=None):
        self.num_retries = 0

    def _wait(self, device=None):
        self.num_waits += 1
