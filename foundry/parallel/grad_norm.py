"""Global norm of gradients that may be sharded, and gradient clipping."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from foundry.core.sharded import is_sharded


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients so that their global norm is at most `max_norm`, without a device synchronization.

    The norm covers all gradients, as if one process held them. A plain gradient, which is the same on all ranks, counts
    once. Each shard of a DTensor counts once: squares are summed over the mesh dimensions that shard it, but not over
    replicating dimensions, as in HSDP and tensor parallelism.

    Args:
        parameters: parameters of the model; those without a gradient are skipped.
        max_norm: above 0; infinity disables scaling. A norm of NaN makes all gradients NaN; an infinite norm makes
            infinite gradients NaN and finite ones 0.

    Returns:
        () float32, the L2 norm before clipping; equal on all ranks, a plain tensor on the device of the first gradient.
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
        # 1e-6 avoids division by zero; torch.nn.utils.clip_grad_norm_ adds the same, so the numbers are equal.
        factor = (max_norm / (norm + 1e-6)).clamp_(max=1.0)
        for (device, _), grads in grads_by.items():
            torch._foreach_mul_(grads, factor.to(device))
    return norm


def local_shard(tensor: Tensor) -> tuple[tuple[ProcessGroup, ...], Tensor]:
    """Return the process groups that a tensor is sharded over, and this rank's shard; a plain tensor is not sharded."""
    if not is_sharded(tensor):
        return (), tensor
    assert not any(placement.is_partial() for placement in tensor.placements), "a gradient is read before it is reduced"
    # Not `is_shard()`, which is false for the strided placement of tensors sharded by tensor parallelism and FSDP2.
    dims = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return tuple(tensor.device_mesh.get_group(dim) for dim in dims), tensor.to_local()
