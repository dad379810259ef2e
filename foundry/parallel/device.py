"""Access to the devices of this machine.

This is the only module that uses torch.cuda for names, memory, generators and streams. Most functions with a `device`
argument also accept the CPU, so that callers need no special case.
"""

import os
import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from foundry.config.environment import gpu_files, visible_gpus
from foundry.config.schemas.device import DeviceKind
from foundry.core.errors import ConfigError, Violation

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables with the settings of torch's GPU memory allocator; the newest name is first."""


def count_cuda() -> int:
    """Return the number of GPUs visible to this process."""
    return torch.cuda.device_count()


def select_cuda(device: torch.device) -> None:
    """Make a GPU the current device of this process, so that "cuda" refers to it."""
    torch.cuda.set_device(device)


def choose_device(kind: DeviceKind = DeviceKind.auto) -> torch.device:
    """Return the device of a process; "cuda" without an index if it uses a GPU.

    GPUs hidden by CUDA_VISIBLE_DEVICES are ignored.

    Raises:
        ConfigError: `kind` is not cpu and torch cannot use the machine's GPU, or `kind` is cuda and there is no GPU.
    """
    if kind is DeviceKind.cpu:
        return torch.device("cpu")
    if torch.cuda.is_available():
        _set_default_variables()
        return torch.device("cuda")
    if visible_gpus() and (files := gpu_files()):
        message = f"is {kind.value} and this machine has a GPU ({files[0]}), but {_explain_unusable_gpu()}"
        raise ConfigError(Violation("device", f"{message}; or set device=cpu"))
    if kind is DeviceKind.cuda:
        raise ConfigError(Violation("device", "is cuda but there is no GPU; set device=cpu or device=auto"))
    return torch.device("cpu")


def _set_default_variables() -> None:
    """Set variables that torch reads at the first allocation and matrix product on a GPU, unless the user has set them.

    Expandable segments of the allocator suit batches of varying size. Deterministic matrix products need a fixed cuBLAS
    workspace, and a process keeps the workspace of its first run, so every run uses this one of 8 x 4,096 KiB.
    https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf
    https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility
    """
    if torch.version.cuda is not None and not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        os.environ[_ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _explain_unusable_gpu() -> str:
    """Explain why torch cannot use an existing GPU, and how to fix it."""
    if torch.version.cuda is None:
        other = "install a wheel with CUDA: https://pytorch.org/get-started/locally"
        return f"torch {torch.__version__} is built without CUDA; {other}"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        reason = "torch.cuda.is_available() is false"
    except (RuntimeError, AssertionError) as error:  # torch gives the reason in the first sentence, then general advice
        reason = re.split(r"\. |\n", str(error), maxsplit=1)[0].rstrip(".")
    remedy = f"update the NVIDIA driver, or install a torch wheel for a CUDA version before {torch.version.cuda}"
    return f"torch {torch.__version__} cannot use it: {reason}; {remedy}"


def describe_devices(device: torch.device, world_size: int) -> str:
    """Return a readable description of a run's devices: "NVIDIA H100 80GB HBM3 x 8", or "cpu, 2 threads".

    Args:
        device: device of this rank; the other ranks are assumed to have the same kind.
        world_size: number of ranks.
    """
    name = device_name(device) + (f" x {world_size}" if world_size > 1 else "")
    if device.type == "cuda":
        return name
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'' if threads == 1 else 's'}{' each' if world_size > 1 else ''}"


def device_name(device: torch.device) -> str:
    """Return the vendor's name of a GPU, such as "NVIDIA H100 80GB HBM3", or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def computes_bf16(device: torch.device) -> bool:
    """Return whether a device multiplies bf16 matrices without emulation."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def synchronize(device: torch.device) -> None:
    """Wait for all queued work on a GPU; no effect on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def finish_copies(device: torch.device) -> None:
    """Wait for all work in the current stream of a GPU, such as copies to pinned memory."""
    torch.cuda.current_stream(device).synchronize()


def cuda_rng_state(device: torch.device) -> Tensor:
    """Return the state of a GPU's generator, (bytes,) uint8 in host memory."""
    return torch.cuda.get_rng_state(device)


def set_cuda_rng_state(state: Tensor, device: torch.device) -> None:
    """Restore a GPU's generator from `cuda_rng_state`."""
    torch.cuda.set_rng_state(state, device)


@dataclass(frozen=True)
class CudaMemory:
    """Memory of a GPU in bytes.

    Attributes:
        allocated: memory in tensors of this process.
        reserved: memory that torch has reserved on the device, including its cache.
        capacity: total memory of the device.
    """

    allocated: int
    reserved: int
    capacity: int


def cuda_memory(device: torch.device) -> CudaMemory:
    """Return the memory of a GPU as counted by torch's allocator for this process."""
    stats = torch.cuda.memory_stats(device)
    return CudaMemory(
        allocated=stats["allocated_bytes.all.current"],
        reserved=stats["reserved_bytes.all.current"],
        capacity=torch.cuda.mem_get_info(device)[1],
    )


def reset_memory_statistics(device: torch.device) -> None:
    """Reset the peak memory statistics and the allocator retries of a GPU that has been selected."""
    torch.cuda.reset_peak_memory_stats(device)
    torch.cuda.reset_accumulated_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory in tensors on a GPU since `reset_memory_statistics`; on a CPU, the peak resident set.

    `ru_maxrss` is in bytes on macOS and in KiB elsewhere.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024


def reserved_memory_bytes(device: torch.device) -> int | None:
    """Return the peak memory that torch has reserved on a GPU, including its cache; None on a CPU.

    The peak is counted since `reset_memory_statistics`.
    """
    return int(torch.cuda.max_memory_reserved(device)) if device.type == "cuda" else None


def allocator_retries(device: torch.device) -> int | None:
    """Return how often a GPU allocation succeeded only after torch had freed its cache; None on a CPU.

    Retries are counted since `reset_memory_statistics`.
    """
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)) if device.type == "cuda" else None


def resident_bytes() -> int:
    """Return the resident set of this process in bytes; if the system reports only its peak, return the peak."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return peak_memory_bytes(torch.device("cpu"))
    return pages * os.sysconf("SC_PAGE_SIZE")


def free_memory(device: torch.device, local_world_size: int = 1) -> int:
    """Return the free memory of a GPU in bytes; on a CPU this rank's share of the host's memory, free or not.

    Memory cached by torch in this process counts as free; memory of other processes does not.

    Args:
        device: device of this rank.
        local_world_size: ranks on this node, which share the host's memory.
    """
    if device.type != "cuda":
        return host_capacity() // local_world_size
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def host_capacity() -> int:
    """Return the memory limit of this process in bytes: the minimum of machine, container and address space."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space)
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = Path("/sys/fs/cgroup") / name
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limits)


def record_memory_history() -> None:
    """Start recording GPU allocations with torch."""
    torch.cuda.memory._record_memory_history()


def dump_memory_history(file: Path) -> None:
    """Write the recorded allocations to a file for https://pytorch.org/memory_viz, and stop recording."""
    torch.cuda.memory._dump_snapshot(str(file))  # type: ignore[no-untyped-call]
    torch.cuda.memory._record_memory_history(enabled=None)
