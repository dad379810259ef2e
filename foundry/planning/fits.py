"""The memory of a run with its own data, and whether its devices have as much."""

import logging
from typing import Any

import torch

from foundry.config.build import field_of
from foundry.config.errors import ConfigError, Violation, format_reason
from foundry.config.lengths import resolve_batch_sizes
from foundry.config.schemas.distributed import GradientSync, resolve_distributed
from foundry.config.schemas.root import Config
from foundry.data.loader import read_batch
from foundry.data.splits import DataSplits
from foundry.parallel.device import device_capacity
from foundry.parallel.process_group import World
from foundry.planning.fake import FakeModel, build_adapted, build_fake
from foundry.planning.memory import Memory, estimate_memory

_GIB = 2**30

logger = logging.getLogger(__name__)


def plan_memory(config: Config, fake: FakeModel, data: DataSplits, *, world_size: int, device_type: str) -> Memory:
    """What a run needs on its fullest rank, with microbatches of its longest sample.

    Args:
        config: of the run.
        fake: its model; left as it is.
        data: its samples.
        world_size: ranks.
        device_type: "cuda" or "cpu".

    Raises:
        ConfigError: as `estimate_memory`.
    """
    samples = config.hparams.per_gpu_batch_size
    # One sample stands for all, which are not read: there may be more than fit into this machine.
    batch = read_batch(data.train, [getattr(data.train, "longest", 0)])
    pack_tokens = row_tokens(config)
    if pack_tokens is not None:  # a full row of several samples is like one of a long sample
        rows = {name: t for name, t in batch.items() if name in ("tokens", "targets")}
        batch |= {name: t[..., :1].expand(*t.shape[:-1], pack_tokens) for name, t in rows.items()}
    sample = {name: t.expand(samples, *t.shape[1:]) for name, t in batch.items()}
    most = field_of(config.objective, "max_new_tokens") if data.train_prompts else None
    return estimate_memory(
        config,
        fake,
        world_size=world_size,
        microbatch={**sample, "position": torch.zeros(samples, dtype=torch.int64)},
        device_type=device_type,
        tokenizer=data.tokenizer,
        answer_tokens=None if most is None else max(len(prompt.tokens) for prompt in data.train_prompts) + most - 1,
        pack_tokens=pack_tokens,
    )


def row_tokens(config: Config) -> int | None:
    """Tokens of a row that holds several samples; None: each has its own row."""
    return int(config.data.seq_len) if field_of(config.data, "packing", False) else None


def check_gradient_sync(config: Config, memory: Memory, *, world_size: int, capacity: int) -> None:
    """Refuse to keep whole gradients through a window where they make the run too large for its devices.

    Args:
        config: of the run.
        memory: what it needs.
        world_size: ranks.
        capacity: bytes of a device.

    Raises:
        ConfigError: the plan exceeds them.
    """
    if _keeps_whole_gradients(config, world_size) and memory.total > capacity:
        sync, of = config.distributed.gradient_sync.value, f"of the {capacity / _GIB:.4g} GiB of a device"
        message = (
            f"is {sync}, which keeps whole gradients, {memory.gradients / _GIB:.4g} GiB: the plan needs "
            f"{memory.total / _GIB:.4g} GiB {of}; set distributed.gradient_sync=every, which keeps a shard of them"
        )
        raise ConfigError(Violation("distributed.gradient_sync", message))


def check_fits(config: Config, data: DataSplits, world: World) -> None:
    """`check_gradient_sync` on the devices of a run that is about to start; free unless whole gradients are kept.

    Raises:
        ConfigError: the plan exceeds this rank's device, or its share of the host's memory.
    """
    if not _keeps_whole_gradients(config, world.world_size):
        return
    try:
        fake = build_fake(lambda: build_adapted(config))
        memory = plan_memory(config, fake, data, world_size=world.world_size, device_type=world.device.type)
    except ConfigError:
        raise
    except Exception as error:  # a model of the user's own may not be built without numbers, and trains nevertheless
        logger.warning("the memory of the run is not known in advance: %s", format_reason(error))
        return
    capacity = device_capacity(world.device, world.local_world_size)
    check_gradient_sync(config, memory, world_size=world.world_size, capacity=capacity)


def _keeps_whole_gradients(config: Config, world_size: int) -> bool:
    """Whether shards of gradients would do."""
    resolved: Any = resolve_distributed(config.distributed, world_size)
    is_sharded = resolved.mesh_shape(world_size).get("shard", 1) > 1
    if not is_sharded or resolved.gradient_sync is GradientSync.every:
        return False
    dp_size = resolved.dp_size(world_size)
    sizes = resolve_batch_sizes(config.hparams, dp_size=dp_size, tokens_per_sample=None).sizes
    return bool(max(sizes) > dp_size * config.hparams.per_gpu_batch_size)
