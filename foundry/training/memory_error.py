"""Error messages for exhausted memory: memory use by part, and settings that reduce it."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from foundry.config.schemas.distributed import FSDP, Resolved
from foundry.config.schemas.hparams import HParams
from foundry.config.schemas.precision import PrecisionMode
from foundry.config.schemas.root import Config
from foundry.core.foreign import is_out_of_host_memory
from foundry.core.sharded import local_part
from foundry.parallel.device import cuda_memory, host_capacity, resident_bytes

_OTHERWISE = "otherwise a smaller model or more devices; foundry plan, with the same overrides, lists memory by part"

_REQUESTED = re.compile(r"(?:Tried|[Uu]nable) to allocate ([\d.]+ [KMGTPE]?i?B)|tried to allocate (\d+) bytes")


class OutOfMemoryError(RuntimeError):
    """The device or host ran out of memory; in training, the message lists memory use by part and remedies."""


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Memory of this rank's device, in bytes.

    Attributes:
        parts: bytes by part: weights or this rank's shards of them, gradients, optimizer state, averaged weights and
            frozen models.
        allocated: bytes of all tensors on a GPU; on a CPU, of the whole process.
        reserved: bytes that torch has reserved on a GPU, including its cache; on a CPU, equal to `allocated`.
        capacity: total memory of the device.
        device_name: GPU or CPU, as the name in messages.
    """

    parts: Mapping[str, int]
    allocated: int
    reserved: int
    capacity: int
    device_name: str = "GPU"

    @property
    def rest(self) -> int:
        """Bytes of activations, gathered weights and workspaces, that is, all memory outside `parts`."""
        return max(0, self.allocated - sum(self.parts.values()))


def measure_device_memory(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    device: torch.device,
    *,
    averages: Iterable[Tensor] = (),
    frozen: Iterable[nn.Module] = (),
) -> DeviceMemory:
    """Measure the memory use of a device: on a GPU without offloaded tensors, on a CPU of the whole process.

    Args:
        model: the wrapped model.
        optimizers: all optimizers of the run.
        device: a CUDA device or the CPU.
        averages: the averaged weights, if kept.
        frozen: frozen models, as placed on the device.
    """
    parameters = list(model.parameters())
    tensors_by_part: dict[str, Iterable[Any]] = {
        "weights": [*parameters, *model.buffers()],
        "gradients": [parameter.grad for parameter in parameters],
        "optimizer state": [one for each in optimizers for state in each.state.values() for one in state.values()],
        "averaged weights": averages,
        "frozen models": [tensor for each in frozen for tensor in (*each.parameters(), *each.buffers())],
    }
    return DeviceMemory(
        parts={name: _bytes_on(device, tensors) for name, tensors in tensors_by_part.items()}, **_memory_in_use(device)
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if memory of a device or the host ran out; False for an `OutOfMemoryError`, which explains that."""
    if isinstance(error, OutOfMemoryError):
        return False  # already explained
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or is_out_of_host_memory(error)


@contextmanager
def explain_memory_errors(device: torch.device, rank: int) -> Iterator[None]:
    """Context manager that explains out-of-memory errors outside of `Trainer.fit`, such as while a run is built.

    Raises:
        OutOfMemoryError: memory of the device or the host ran out.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        in_host = device.type != "cuda" or not isinstance(error, torch.OutOfMemoryError)
        used = _memory_in_use(torch.device("cpu") if in_host else device)
        raise OutOfMemoryError(
            f"out of {used['device_name']} memory on rank {rank} while the run was built: {_requested_size(error)}"
            f"{_size(used['allocated'])} of {_size(used['capacity'])} are in use\n"
            f"  {_OTHERWISE}"
        ) from error


def explain_out_of_memory(
    error: BaseException,
    memory: DeviceMemory,
    config: Config,
    *,
    distributed: Resolved,
    moment: str,
    rank: int,
    world_size: int,
) -> str:
    """Return a message with the memory use by part and settings that reduce it; the first line can be read alone.

    Args:
        error: the error raised by torch, which names the size of the failed allocation.
        memory: memory of this rank's device.
        config: configuration of the run; settings already in use are not suggested.
        distributed: resolved strategy of the run.
        moment: time of the failure, such as "in step 3".
        rank: this rank.
        world_size: number of ranks.
    """
    usage = f"{_size(memory.allocated)} of {_size(memory.capacity)} are in use"
    cached = max(0, memory.reserved - memory.allocated)
    parts = {**memory.parts, "activations and temporary buffers": memory.rest, "cached (fragmented)": cached}
    remedies = list(_activation_remedies(config.hparams))
    if memory.device_name == "GPU":  # on a host, more ranks or offloading would use the same memory
        remedies += _state_remedies(config, distributed, world_size)
    return "\n  ".join(
        [
            f"out of {memory.device_name} memory {moment} on rank {rank}: {_requested_size(error)}{usage}",
            ", ".join(f"{name} {_size(size)}" for name, size in parts.items() if size > 0),
            *remedies,
            _OTHERWISE,
        ]
    )


def _activation_remedies(hparams: HParams) -> Iterator[str]:
    """Yield the settings that reduce activation memory in any model, each with its effect."""
    size = hparams.per_gpu_batch_size
    if size > 1:
        # All batch sizes of a ramp are multiples of `size`, so a divisor of `size` divides them too.
        smaller_size = max(divisor for divisor in range(1, size // 2 + 1) if size % divisor == 0)
        times = size // smaller_size
        yield (
            f"hparams.per_gpu_batch_size={smaller_size}: activations / {times}, and the same updates: "
            f"accumulates {times} times as many microbatches"
        )
    if not hparams.grad_checkpointing:
        effect = "keeps only the input of each block and computes the rest twice; about a third slower"
        yield f"hparams.grad_checkpointing=true: {effect}"


def _state_remedies(config: Config, distributed: Resolved, world_size: int) -> Iterator[str]:
    """Yield the setting that shards weights, gradients and optimizer state, or if they are sharded, offloads them."""
    states = "weights, gradients and optimizer state"
    if not isinstance(distributed, FSDP):
        more = " distributed.nproc_per_node=2" if world_size == 1 else ""
        yield f"distributed=fsdp{more}: {states} are sharded over all ranks"
    elif not distributed.cpu_offload and config.precision.mode is not PrecisionMode.amp_float16:
        strategy = "" if isinstance(config.distributed, FSDP) else "distributed=fsdp "
        yield f"{strategy}distributed.cpu_offload=true: {states} in host memory; slower"


def _bytes_on(device: torch.device, tensors: Iterable[Any]) -> int:
    local = map(local_part, tensors)
    return sum(t.numel() * t.element_size() for t in local if isinstance(t, Tensor) and t.device == device)


def _size(num_bytes: int) -> str:
    for name, scale in (("PiB", 2**50), ("TiB", 2**40), ("GiB", 2**30)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {name}"
    return f"{num_bytes / 2**20:.1f} MiB"


def _requested_size(error: BaseException) -> str:
    match = _REQUESTED.search(str(error))
    if match is None:
        return ""
    return f"{match[1] or _size(int(match[2]))} more were requested, "


def _memory_in_use(device: torch.device) -> dict[str, Any]:
    """Return allocated, reserved and total bytes, and the device's name; on a CPU, allocated is resident memory."""
    if device.type == "cuda":
        return {**asdict(cuda_memory(device)), "device_name": "GPU"}
    resident = resident_bytes()
    return {"allocated": resident, "reserved": resident, "capacity": host_capacity(), "device_name": "CPU"}
