"""Preparing a model for distributed training: tensor parallelism, checkpointing, compilation, and DDP or FSDP2.

On a single process, the strategies `ddp` and `fsdp` do not wrap the model, and every gradient synchronization policy is
valid. The exception is `cpu_offload`, which FSDP2 implements: it shards the model over a group of one rank.
"""

import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from foundry.config.schemas.distributed import DDP, FSDP, Single
from foundry.core.errors import ConfigError, Violation
from foundry.core.protocols import Synchroniser
from foundry.core.sharded import sharded_modules
from foundry.core.tasks import installed_tasks
from foundry.models.fsdp_block import find_blocks
from foundry.models.initialisation import Fill, allocate
from foundry.parallel.checkpointing import checkpointed
from foundry.parallel.compilation import compile_blocks
from foundry.parallel.gradient_sync import DDPSync, DeferredDDPSync, FSDPSync, LocalSync
from foundry.parallel.precision import PrecisionPolicy
from foundry.parallel.process_group import World
from foundry.parallel.tensor_parallel import divide, is_divisible

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, OffloadPolicy

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parallel:
    """A model ready for training.

    Attributes:
        model: the module to call; its parameters are passed to the optimizer.
        sync: gradient synchronization policy of the model.
    """

    model: nn.Module
    sync: Synchroniser

    @property
    def inner(self) -> nn.Module:
        """The model without DDP's wrapper, with its own parameter names; forward passes must call `model` instead."""
        return cast(nn.Module, self.model.module) if isinstance(self.model, DistributedDataParallel) else self.model


class RanksDifferError(RuntimeError):
    """Error if a model's parameters or buffers differ between ranks when it is placed on the devices."""


def parallelize(
    model: nn.Module,
    policy: PrecisionPolicy,
    world: World,
    *,
    grad_checkpointing: bool,
    torchcompile: bool,
    selective_checkpointing: bool = False,
    fill: Fill | None = None,
) -> Parallel:
    """Set up activation checkpointing and compilation of the blocks, then wrap the model.

    Parameter names do not change; with DDP, this holds for the names in `Parallel.inner`.

    Args:
        model: equal on all ranks, after `policy.prepare`; changed in place and moved to the device. Parameters on the
            meta device are allocated on the device, with FSDP2 one unit at a time.
        policy: precision policy.
        world: from `process_group`; defines the strategy and its device mesh.
        grad_checkpointing: recompute each block's activations in the backward pass.
        torchcompile: compile each block.
        selective_checkpointing: do not recompute the most expensive operators that `grad_checkpointing` would
            recompute.
        fill: initializes the weights once they are on the device; None if the model is initialized already or a
            checkpoint is loaded later.

    Raises:
        ConfigError: a setting has no effect on this model or contradicts another, or tensor parallelism cannot shard
            the model.
        RanksDifferError: parameters or buffers differ between ranks; the message names the first.
    """
    distributed = world.distributed
    blocks = list(find_blocks(model))
    if (grad_checkpointing or torchcompile) and not blocks:
        key = "hparams.grad_checkpointing" if grad_checkpointing else "hparams.torchcompile"
        message = f"is true but {type(model).__name__} has no blocks; derive them from FSDPBlock, or set it to false"
        raise ConfigError(Violation(key, message))
    if world.world_size > 1:
        _check_equal(model, world)
    if world.tp_mesh is not None:
        divide(model, world.tp_mesh, policy)
    for block in blocks:
        if grad_checkpointing:
            # Replaces the instance's forward method; a wrapper module would rename all parameters of the block.
            block.forward = checkpointed(block.forward, selective=selective_checkpointing)
    if torchcompile:
        compile_blocks(blocks)
    if isinstance(distributed, Single):
        return Parallel(_place(model, world, fill), LocalSync())
    if isinstance(distributed, DDP):
        return _wrap_ddp(model, distributed, policy, world, fill)
    return _wrap_fsdp(model, distributed, policy, world, fill)


def place_frozen(model: nn.Module, policy: PrecisionPolicy, world: World, *, fill: Fill | None = None) -> nn.Module:
    """Freeze a model and place it on the device: sharded if the strategy is FSDP or HSDP, else whole on every rank.

    A model that tensor parallelism cannot shard is sharded over the data-parallel ranks only.

    Args:
        model: as for `parallelize`.
        policy: precision policy.
        world: from `process_group`.
        fill: as for `parallelize`.

    Raises:
        RanksDifferError: parameters or buffers differ between ranks; the message names the first.
    """
    model.requires_grad_(False).eval()
    if world.world_size > 1:
        _check_equal(model, world)
    if isinstance(world.distributed, FSDP):
        if world.tp_mesh is not None and is_divisible(model, world.tp_mesh.size()):
            divide(model, world.tp_mesh, policy)
        return _wrap_fsdp(model, world.distributed, policy, world, fill).model
    return _place(model, world, fill)


def _place(model: nn.Module, world: World, fill: Fill | None) -> nn.Module:
    """Move an unsharded model to the device and initialize it.

    Without `fill`, parameters from the meta device have arbitrary values until a checkpoint is loaded.
    """
    allocate(model.parameters(), world.device)
    model = model.to(world.device)
    if fill is not None:
        fill(model)
        if world.world_size > 1:
            _check_equal(model, world)
    return model


def _wrap_ddp(model: nn.Module, ddp: DDP, policy: PrecisionPolicy, world: World, fill: Fill | None) -> Parallel:
    if violations := list(ddp.check()):
        raise ConfigError(violations)
    if ddp.shard_optimizer:
        return _wrap_sharded_optimizer(model, ddp, policy, world, fill)
    model = _place(model, world, fill)
    if not ddp.overlap_grad_reduce:
        return Parallel(model, DeferredDDPSync(list(model.parameters()), ddp.gradient_sync, world))
    wrapped = DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        process_group=world.dp_group,
        bucket_cap_mb=cast(int, ddp.bucket_cap_mb),  # torch accepts fractions, although its annotation is int
        gradient_as_bucket_view=True,
        init_sync=False,
    )
    # FSDP2 does not broadcast buffers before each forward pass either, so a model behaves the same with both. The
    # attribute is set because torch 2.13 renamed the argument and warns about the name used by 2.11.
    wrapped.broadcast_buffers = False
    return Parallel(wrapped, DDPSync(wrapped, ddp.gradient_sync))


def _wrap_sharded_optimizer(
    model: nn.Module, ddp: DDP, policy: PrecisionPolicy, world: World, fill: Fill | None
) -> Parallel:
    """Wrap the model as with Megatron's distributed optimizer.

    Gradients are reduce-scattered, and weights are gathered once per window and kept until its end. Without
    `overlap_grad_reduce` the whole model is one unit, so all weights are gathered, and all gradients reduced, together.
    """
    replicated = _shard(
        model,
        world,
        policy,
        blocks=ddp.overlap_grad_reduce,
        reshard_after_forward=False,
        offload=None,
        overlap=ddp.overlap_param_gather,
        fill=fill,
    )
    sync = FSDPSync(
        model, ddp.gradient_sync, world, replicated=replicated, reshard_after_forward=False, keep_params=True
    )
    return Parallel(model, sync)


def _wrap_fsdp(model: nn.Module, fsdp: FSDP, policy: PrecisionPolicy, world: World, fill: Fill | None) -> Parallel:
    from torch.distributed.fsdp import CPUOffloadPolicy

    if world.is_main and not any(find_blocks(model)):
        message = "has no blocks, so all of its weights are gathered at once, which saves little memory; derive its"
        remedy = "repeated layers from FSDPBlock, or return their types from get_fsdp_block_types()"
        log.warning("distributed=%s: %s %s %s", fsdp.strategy, type(model).__name__, message, remedy)
    reshard = fsdp.reshard_after_forward
    replicated = _shard(
        model,
        world,
        policy,
        blocks=True,
        reshard_after_forward=reshard,
        # Pinned memory needs a GPU.
        offload=CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if fsdp.cpu_offload else None,
        overlap=fsdp.overlap_param_gather,
        fill=fill,
    )
    sync = FSDPSync(model, fsdp.gradient_sync, world, replicated=replicated, reshard_after_forward=reshard)
    return Parallel(model, sync)


def _shard(
    model: nn.Module,
    world: World,
    policy: PrecisionPolicy,
    *,
    blocks: bool,
    reshard_after_forward: bool,
    offload: "OffloadPolicy | None",
    overlap: bool,
    fill: Fill | None,
) -> list[nn.Parameter]:
    """Apply `fully_shard` to the blocks (if `blocks` is True), inner before outer, and to the root; then call `fill`.

    Returns:
        The parameters that stay unsharded.
    """
    from torch.distributed.fsdp import OffloadPolicy, fully_shard, register_fsdp_forward_method

    mesh, device = world.dp_mesh, world.device
    units = list(find_blocks(model)) if blocks else []
    replicated = _find_replicated(model, units, policy)
    for parameter in replicated:
        parameter.data = parameter.data.to(mesh.device_type)
    shard = partial(fully_shard, mesh=mesh, offload_policy=offload or OffloadPolicy(), ignored_params=set(replicated))
    for unit in units:
        allocate(unit.parameters(), device)  # the next line keeps only this rank's part
        shard(unit, mp_policy=policy.fsdp_policy(), reshard_after_forward=reshard_after_forward)
    allocate(model.parameters(), device)
    shard(model, mp_policy=policy.fsdp_policy(root=True), reshard_after_forward=reshard_after_forward)
    for name in (name for task in installed_tasks() for name in task.forward_methods):
        if hasattr(model, name):
            register_fsdp_forward_method(model, name)  # this method may run blocks before the first forward()
    if fill is not None:
        fill(model)
    _set_prefetch(sharded_modules(model), overlap)
    return replicated


def _find_replicated(model: nn.Module, units: Sequence[nn.Module], policy: PrecisionPolicy) -> list[nn.Parameter]:
    """Return the parameters that stay unsharded on every rank.

    No reference to any other parameter outlives the call, because FSDP2 frees an unsharded parameter when its last
    reference is gone.
    """
    in_blocks = {parameter for unit in units for parameter in unit.parameters()}
    return [p for p in model.parameters() if policy.is_replicated(p, in_block=p in in_blocks)]


def _set_prefetch(units: "list[FSDPModule]", overlap: bool) -> None:
    """If `overlap` is True, also prefetch the next unit in the forward pass; otherwise disable all prefetching."""
    if overlap:
        for unit, next_unit in pairwise(units):
            unit.set_modules_to_forward_prefetch([next_unit])
        return
    for unit in units:
        # An explicit list replaces FSDP2's own prefetching, and a unit that is already gathered is not gathered again.
        unit.set_modules_to_backward_prefetch([unit])


def _check_equal(model: nn.Module, world: World) -> None:
    """Check that the model is equal on all ranks by comparing one checksum per tensor.

    Takes four collectives for any model size, of at most one int64 per parameter and buffer. For tensors on the meta
    device, names, dtypes and shapes are compared.
    """
    shapes, sums = list[tuple[str, tuple[int, ...]]](), list[Tensor]()
    # Do not collect the tensors in a list: the first collective of a process imports torch modules that keep the frames
    # of their callers, and with them whole parameters, until the next full garbage collection.
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        shapes.append((name, tuple(tensor.shape)))
        sums.append(_checksum(name, tensor).to(world.device))
    count = torch.tensor([len(sums)], device=world.device)
    if _differing(count):
        raise RanksDifferError(
            f"the model has {len(sums)} parameters and buffers on rank {world.rank}, but not on all ranks"
        )
    differing = _differing(torch.stack(sums)) if sums else []
    if differing:
        name, shape = shapes[differing[0]]
        raise RanksDifferError(
            f"{name} {shape} is not the same on all ranks (and {len(differing) - 1} more):"
            " build the model from one seed, or load it from one file, on every rank"
        )


def _checksum(name: str, tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits as integers, () int64; on the meta device, a CRC of name, dtype and shape."""
    if tensor.is_meta:
        return torch.tensor(zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()))
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(integers.get(flat.element_size(), torch.int64)).sum(dtype=torch.int64)


def _differing(values: Tensor) -> list[int]:
    """Return the indices of the (n,) int64 `values` that differ between ranks."""
    lowest, highest = values.clone(), values.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return [int(index) for index in (lowest != highest).nonzero().flatten()]
