"""The memory of the devices that ranks train on."""

import os
import resource
from pathlib import Path

import torch

from foundry.parallel.process_group import World


def device_capacity(world: World) -> int:
    """Bytes of this rank's GPU, or its share of the host's memory."""
    if world.device.type == "cuda":
        return torch.cuda.mem_get_info(world.device)[1]
    return host_capacity() // world.local_world_size


def free_memory(world: World) -> int:
    """Bytes of this rank's GPU that no tensor holds; on a CPU its share of the host's memory, whatever holds it."""
    if world.device.type != "cuda":
        return device_capacity(world)
    unused = torch.cuda.memory_reserved(world.device) - torch.cuda.memory_allocated(world.device)
    return torch.cuda.mem_get_info(world.device)[0] + unused


def host_capacity() -> int:
    """Bytes that this process may have: of the machine, its container or its address space, whichever is least."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space)
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = Path("/sys/fs/cgroup") / name
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limits)
