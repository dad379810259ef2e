"""Muon for matrices that may be sharded.

`torch.optim.Muon` multiplies the shards of a matrix through DTensor, in bfloat16, where partial products are rounded
before they are summed: in three steps two ranks are 1e-3 away from one. Here each update is gathered and orthogonalised
whole, so any number of ranks takes the same one; momentum and weights stay sharded. Each matrix has one rank that does
this for it, and the update travels in the type of the iteration, to which it is rounded first in any case.

Equal gradients give equal updates in either arithmetic. Gradients that differ in the last bit, as sums in another order
do, give updates that differ by at most 3.4445^5 = 485 times as much in fp32. In bfloat16 a difference may also change
which way a number is rounded, and weak directions are made of such roundings.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from foundry.optim.eager import EagerOptimizer
from foundry.optim.owners import Batch, divide, place
from foundry.training.sharded import is_sharded, local_part

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(EagerOptimizer):
    """Momentum, orthogonalised (Jordan et al., 2024); in bfloat16 one process equals `torch.optim.Muon` bit for bit.

    The update is scaled to the root mean square of AdamW's (Liu et al., 2025), so that both use the same rate, and
    weight decay is decoupled. Each matrix is orthogonalised by one rank, so that all have about the same work.

    Args:
        params: matrices, or groups of them; DTensors may be sharded in any way.
        lr: learning rate.
        momentum: decay of the velocity.
        nesterov: look ahead by one step of momentum.
        ns_steps: Newton-Schulz iterations.
        ns_dtype: what they are computed in: float32 or bfloat16.
        weight_decay: decoupled, times the rate.
        group: the ranks that hold equal plain matrices and gradients, as under DDP, and divide the work of these; None:
            each rank does it all. DTensors know their ranks.
    """

    # As fused optimizers do, it leaves the update out where `found_inf` is 1, without reading the device.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        momentum: float,
        nesterov: bool,
        ns_steps: int,
        ns_dtype: torch.dtype,
        weight_decay: float,
        group: ProcessGroup | None = None,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "ns_steps": ns_steps, "ns_dtype": ns_dtype})
        self.found_inf: Tensor | None = None
        self._group = group
        self._batches: tuple[list[int], list[tuple[list[int], Batch]]] = [], []
        for each in self.param_groups:
            assert all(p.ndim == 2 for p in each["params"]), "Muon is for matrices"

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every matrix that has a gradient."""
        assert closure is None, "the loss is evaluated once a step"
        moving = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        updates = [self._update(batch, [moving[n] for n in numbers]) for numbers, batch in self._divided(moving)]
        # While one batch is orthogonalised, the next is gathered and the one before returns; alike on all ranks.
        for tick in range(len(updates) + 2):
            for update in reversed(updates[max(0, tick - 2) : tick + 1]):
                next(update, None)
        return None

    def _divided(self, moving: list[tuple[Tensor, dict[str, Any]]]) -> list[tuple[list[int], Batch]]:
        """The matrices in batches, by number; computed anew only where others have gradients."""
        known = [id(matrix) for matrix, _ in moving]
        if self._batches[0] != known:
            kinds: dict[Any, list[int]] = {}
            placed = place([matrix for matrix, _ in moving], self._group)
            for number, (matrix, group) in enumerate(moving):
                kinds.setdefault((placed[number].group, group["ns_dtype"], _device(matrix)), []).append(number)
            batches = list[tuple[list[int], Batch]]()
            for (_, dtype, device), numbers in kinds.items():
                members = [placed[number] for number in numbers]
                for chosen, batch in divide(members, [_cost(*each.shape) for each in members], dtype, device):
                    batches.append(([numbers[index] for index in chosen], batch))
            self._batches = known, batches
        return self._batches[1]

    def _update(self, batch: Batch, members: list[tuple[Tensor, dict[str, Any]]]) -> Iterator[None]:
        """Update a batch of matrices, and pause while something of it is on its way."""
        arriving = batch.gather([self._advance(matrix, group) for matrix, group in members])
        yield
        own = [group for (_, group), is_mine in zip(members, batch.is_mine, strict=True) if is_mine]
        wholes = zip(arriving(), own, strict=True)
        returning = batch.scatter([orthogonalise(whole, g["ns_steps"], g["ns_dtype"]) for whole, g in wholes])
        yield
        for (matrix, group), direction in zip(members, returning(), strict=True):
            self._apply(matrix, direction, group)

    def _advance(self, matrix: Tensor, group: dict[str, Any]) -> Tensor:
        """Move the momentum on, and return this rank's part of what is to be orthogonalised."""
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        assert matrix.grad is not None
        grad, velocity = local_part(matrix.grad), local_part(state["momentum_buffer"])
        moved = velocity.lerp(grad, 1 - group["momentum"])
        ahead = grad.lerp(moved, group["momentum"]) if group["nesterov"] else moved
        velocity.copy_(moved if self.found_inf is None else torch.where(self.found_inf > 0, velocity, moved))
        return ahead

    def _apply(self, matrix: Tensor, direction: Tensor, group: dict[str, Any]) -> None:
        weight, rate = local_part(matrix), group["lr"] * 0.2 * math.sqrt(max(matrix.shape))
        # Of bf16 weights too: `add_` rounds bf16 otherwise at the end of a tensor, and a shard ends elsewhere.
        updated = weight.float() * (1 - group["lr"] * group["weight_decay"])
        updated.add_(direction.to(weight.device), alpha=-rate)
        weight.copy_(updated if self.found_inf is None else torch.where(self.found_inf > 0, weight, updated))


def orthogonalise(matrix: Tensor, num_steps: int, dtype: torch.dtype) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly: singular values end up between about 0.7 and 1.2.

    A quintic Newton-Schulz iteration with the coefficients of https://kellerjordan.github.io/posts/muon.

    Args:
        matrix: (rows, columns) floating point.
        num_steps: iterations.
        dtype: of the iteration.

    Returns:
        (rows, columns) of `dtype`.
    """
    a, b, c = _COEFFICIENTS
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.to(dtype)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)  # the iteration converges for singular values of at most about 1
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _device(matrix: Tensor) -> torch.device:
    """Where a matrix is orthogonalised: on the GPU, where its shards are offloaded from one."""
    return torch.device(matrix.device_mesh.device_type) if is_sharded(matrix) else matrix.device


def _cost(rows: int, columns: int) -> float:
    """FLOPs of an iteration, but for a factor."""
    short, long = sorted((rows, columns))
    return short**2 * (2.0 * long + short)
