"""Estimate of a run's memory with its own data, and a check against the memory of its devices."""

import logging
from typing import Any

import torch

from foundry.config.build import field_of
from foundry.config.lengths import resolve_batch_sizes
from foundry.config.schemas.distributed import GradientSync, Resolved, resolve_distributed
from foundry.config.schemas.root import Config
from foundry.core.errors import ConfigError, Violation, format_reason
from foundry.core.protocols import Microbatch
from foundry.data.splits import DataSplits
from foundry.parallel.device import free_memory
from foundry.parallel.process_group import World
from foundry.planning.fake import FakeModel, build_adapted, build_fake
from foundry.planning.memory import Memory, estimate_memory

_GIB = 2**30
_KERNELS_BYTES = 700 * 2**20
"""Growth of a CUDA context in a run, from about 300 MB at the start to more than 1,000 MB with every kernel of torch
loaded: https://github.com/pytorch/pytorch/issues/107667."""
_COMMUNICATOR_BYTES = 688 * 2**20
"""Buffers of one NCCL communicator, allocated by its first collective; measured with NVLink between four A100s:
https://github.com/NVIDIA/nccl/issues/964."""

logger = logging.getLogger(__name__)


def plan_memory(config: Config, fake: FakeModel, data: DataSplits, *, world_size: int, device_type: str) -> Memory:
    """Estimate the memory on the rank that needs the most, for microbatches of the longest sample or of full rows.

    Args:
        config: configuration of the run.
        fake: model of the run; not modified.
        data: samples of the run.
        world_size: number of ranks.
        device_type: "cuda" or "cpu".

    Raises:
        ConfigError: as in `estimate_memory`.
    """
    samples = config.hparams.per_gpu_batch_size
    batch = read_longest(data, samples)
    pack_tokens = row_tokens(config)
    if pack_tokens is not None:  # a full packed row needs as much memory as one long sample
        rows = {name: t for name, t in batch.items() if name in ("tokens", "targets")}
        batch |= {name: t[..., :1].expand(*t.shape[:-1], pack_tokens) for name, t in rows.items()}
    return estimate_memory(
        config,
        fake,
        world_size=world_size,
        microbatch={**batch, "position": torch.zeros(samples, dtype=torch.int64)},
        device_type=device_type,
        tokenizer=data.tokenizer,
        answer_tokens=answer_tokens(config, data),
        pack_tokens=pack_tokens,
    )


def read_longest(data: DataSplits, num_samples: int) -> Microbatch:
    """Return a microbatch that repeats the longest training sample; no other sample is read.

    Args:
        data: data of the run.
        num_samples: length of the first dimension of each tensor, along which the sample is expanded.
    """
    batch = data.train.batch([data.train.longest])
    return {name: t.expand(num_samples, *t.shape[1:]) for name, t in batch.items()}


def answer_tokens(config: Config, data: DataSplits) -> int | None:
    """Return the tokens of the longest prompt with the longest answer; None without prompts or without generation."""
    max_new_tokens = field_of(config.objective, "max_new_tokens") if data.train_prompts else None
    return (
        None
        if max_new_tokens is None
        else max(len(prompt.tokens) for prompt in data.train_prompts) + max_new_tokens - 1
    )


def row_tokens(config: Config) -> int | None:
    """Return the tokens of a packed row; None if each sample has its own row."""
    return int(config.data.seq_len) if field_of(config.data, "packing", False) else None


def usable_memory(free_bytes: int, distributed: Resolved, world_size: int, device_type: str) -> int:
    """Return the bytes of a device available for tensors: free memory, on a GPU less a margin for CUDA and NCCL.

    Args:
        free_bytes: free bytes at the start of the run.
        distributed: settings of the strategy; each dimension of a mesh with several dimensions has its own
            communicator.
        world_size: number of ranks.
        device_type: "cuda" or "cpu".
    """
    if device_type != "cuda":
        return free_bytes
    dims = len(distributed.mesh_shape(world_size))
    communicators = 0 if world_size == 1 else 1 if dims <= 1 else 1 + dims
    return max(0, free_bytes - _KERNELS_BYTES - communicators * _COMMUNICATOR_BYTES)


def check_gradient_sync(config: Config, memory: Memory, *, world_size: int, capacity: int) -> None:
    """Check that a run that keeps whole gradients through a window fits its devices; other runs are not checked.

    Args:
        config: configuration of the run.
        memory: estimated memory.
        world_size: number of ranks.
        capacity: bytes of a device that the run may use.

    Raises:
        ConfigError: the estimate exceeds `capacity`.
    """
    if _keeps_whole_gradients(config, world_size) and memory.total > capacity:
        sync, limit = (
            config.distributed.gradient_sync.value,
            f"but a device has {capacity / _GIB:.4g} GiB available",
        )
        message = (
            f"is {sync}, which keeps whole gradients, {memory.gradients / _GIB:.4g} GiB: the plan needs "
            f"{memory.total / _GIB:.4g} GiB {limit}; set distributed.gradient_sync=every, which keeps a shard of them"
        )
        raise ConfigError(Violation("distributed.gradient_sync", message))


def check_fits(config: Config, data: DataSplits, world: World) -> None:
    """Call `check_gradient_sync` for the devices of a run that is about to start.

    Estimates the memory only if the run keeps whole gradients; otherwise the call costs nothing.

    Raises:
        ConfigError: the estimate exceeds the free memory of this rank's GPU, or on a CPU its share of host memory.
    """
    if not _keeps_whole_gradients(config, world.world_size):
        return
    try:
        fake = build_fake(lambda: build_adapted(config))
        memory = plan_memory(config, fake, data, world_size=world.world_size, device_type=world.device.type)
    except ConfigError:
        raise
    except Exception as error:  # a user's model that cannot be built from fake tensors may still train
        logger.warning("the memory of the run cannot be planned: %s", format_reason(error))
        return
    free_bytes = free_memory(world.device, world.local_world_size)
    capacity = usable_memory(free_bytes, world.distributed, world.world_size, world.device.type)
    check_gradient_sync(config, memory, world_size=world.world_size, capacity=capacity)


def _keeps_whole_gradients(config: Config, world_size: int) -> bool:
    """Return whether the run keeps whole gradients through a window although sharded gradients would be possible."""
    resolved: Any = resolve_distributed(config.distributed, world_size)
    is_sharded = resolved.mesh_shape(world_size).get("shard", 1) > 1
    if not is_sharded or resolved.gradient_sync is GradientSync.every:
        return False
    dp_size = resolved.dp_size(world_size)
    sizes = resolve_batch_sizes(config.hparams, dp_size=dp_size, tokens_per_sample=None).sizes
    return bool(max(sizes) > dp_size * config.hparams.per_gpu_batch_size)
