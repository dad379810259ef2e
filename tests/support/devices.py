"""What tests of a device share: the same test on the CPU and on a GPU, and what reaches the device."""

from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foundry.parallel import device
from foundry.parallel.process_group import World

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
"""For `parametrize`: what a GPU has to show is shown of the CPU too, so that the test itself is known to work."""


def device_of(name):
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def alone_on(name):
    """One process on a device."""
    return World.single(device_of(name))


class Operations(TorchDispatchMode):
    """The operations that reach a device, with the type of what they give."""

    _READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero")

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.seen.append((function.name(), getattr(found, "dtype", None)))
        return found

    @property
    def names(self):
        return [name for name, _ in self.seen]

    @property
    def num_reads(self):
        """How often the host has looked at a number of a tensor, wherever that lies."""
        return sum(name in self._READS for name in self.names)


@contextmanager
def waiting_is_an_error(name):
    """A body in which nothing may wait for a GPU; on a CPU nothing can."""
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
    """A body whose runs take that device, whatever the machine has."""
    with monkeypatch.context() as patch:
        if name == "cpu":
            patch.setattr(torch.cuda, "is_available", lambda: False)
            patch.setattr(device, "gpu_files", list)
        yield


@dataclass
class FakeGpus:
    """Answers of torch.cuda about GPUs that are not there; every GPU has the same memory, in bytes."""

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
        """Have torch.cuda answer as this object says at the time; nothing computes on these GPUs."""
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
