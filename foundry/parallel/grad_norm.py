"""The global norm of a gradient that is partly sharded, and clipping by it."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from foundry.core.sharded import is_sharded


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients so that their global norm is at most `max_norm`; no device is read.

    The norm is that of all gradients together, as if one process held them. A plain gradient counts once, being the
    same on all ranks. A DTensor counts each shard once: the squares are summed over the mesh dimensions that shard it
    and not over those that replicate it, as HSDP and tensor parallelism do.

    Args:
        parameters: those of the model; without a gradient they count nothing.
        max_norm: above 0; infinity: nothing is scaled. Where the norm is not finite the gradients become so too.

    Returns:
        () float32, the L2 norm before, equal on all ranks, a plain tensor on the device of the first gradient.
    """
    grads_by = dict[tuple[torch.device, tuple[ProcessGroup, ...]], list[Tensor]]()
    for parameter in parameters:
        if (grad := parameter.grad) is not None:
            groups, local = local_shard(grad)
            grads_by.setdefault((local.device, groups), []).append(local)
    total: Tensor | None = None
    for (_, groups), grads in grads_by.items():
        squares = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)).square().sum()
        for group in groups:
            dist.all_reduce(squares, group=group)
        total = squares if total is None else total + squares.to(total.device)
    if total is None:
        return torch.zeros(())
    norm = total.sqrt()
    if max_norm < math.inf:
        # 1e-6 as in torch.nn.utils.clip_grad_norm_: no division by zero, and the same numbers.
        factor = (max_norm / (norm + 1e-6)).clamp_(max=1.0)
        for (device, _), grads in grads_by.items():
            torch._foreach_mul_(grads, factor.to(device))
    return norm


def local_shard(tensor: Tensor) -> tuple[tuple[ProcessGroup, ...], Tensor]:
    """The process groups over which a tensor is divided, and this rank's part of it; a plain one is whole."""
    if not is_sharded(tensor):
        return (), tensor
    assert not any(placement.is_partial() for placement in tensor.placements), "a gradient is read before it is reduced"
    # Not `is_shard()`, which is false of what FSDP2 has cut once more, after tensor parallelism.
    dims = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return tuple(tensor.device_mesh.get_group(dim) for dim in dims), tensor.to_local()
