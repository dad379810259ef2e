"""The global norm of a gradient that is partly sharded, and clipping by it."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from foundry.training.sharded import is_sharded

_Grads = list[Tensor]


@torch.no_grad()
def global_grad_norm(parameters: Iterable[Tensor]) -> Tensor:
    """L2 norm of all gradients together, as if one process held them; no device is read.

    A plain gradient counts once, being the same on all ranks. A DTensor counts each shard once: the squares are summed
    over the mesh dimensions that shard it and not over those that replicate it, as HSDP and tensor parallelism do.

    Args:
        parameters: those of the model; without a gradient they count nothing.

    Returns:
        () float32 plain tensor, equal on all ranks, on the device of the first gradient.
    """
    by_groups: dict[tuple[ProcessGroup, ...], _Grads] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            groups, grad = _local(parameter.grad)
            by_groups.setdefault(groups, []).append(grad)
    total: Tensor | None = None
    for groups, grads in by_groups.items():
        squares = _sum_of_squares(grads)
        for group in groups:
            dist.all_reduce(squares, group=group)
        total = squares if total is None else total + squares.to(total.device)
    return torch.zeros(()) if total is None else total.sqrt()


@torch.no_grad()
def clip_(parameters: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale the gradients so that their global norm is at most `max_norm`, without reading the device.

    Args:
        parameters: those whose gradients `norm` was taken of.
        norm: () float32, from `global_grad_norm`. Where it is not finite the gradients become so too.
        max_norm: above 0.
    """
    # 1e-6 as in torch.nn.utils.clip_grad_norm_: no division by zero, and the same numbers.
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    by_device: dict[torch.device, _Grads] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            grad = _local(parameter.grad)[1]
            by_device.setdefault(grad.device, []).append(grad)
    for device, grads in by_device.items():
        torch._foreach_mul_(grads, factor.to(device))


def _local(grad: Tensor) -> tuple[tuple[ProcessGroup, ...], Tensor]:
    """The process groups over which a gradient is sharded, and this rank's part of it."""
    if not is_sharded(grad):
        return (), grad
    assert not any(placement.is_partial() for placement in grad.placements), "a gradient is read before it is reduced"
    # Not `is_shard()`, which is false of what FSDP2 has cut once more, after tensor parallelism.
    dims = [dim for dim, placement in enumerate(grad.placements) if not placement.is_replicate()]
    return tuple(grad.device_mesh.get_group(dim) for dim in dims), grad.to_local()


def _sum_of_squares(grads: _Grads) -> Tensor:
    """() float32 on the device of the first gradient."""
    by_device: dict[torch.device, _Grads] = {}
    for grad in grads:
        by_device.setdefault(grad.device, []).append(grad)
    device = grads[0].device
    sums = [
        torch.stack(torch._foreach_norm(same, 2, dtype=torch.float32)).square().sum().to(device)
        for same in by_device.values()
    ]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()
