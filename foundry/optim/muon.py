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
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from foundry.core.sharded import is_sharded, local_part
from foundry.optim.eager import EagerOptimizer
from foundry.optim.owners import Batch, cut, divide, join, place

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_CHUNK_BYTES = 64 * 2**20
"""Of the parts of matrices whose momentum or weights are updated together, unless one alone has more; an update holds
up to four times as much."""
_HOST_CHUNK_BYTES = 64 * 2**10
"""The same on a CPU, where joining saves calls, and copies of more than its cache cost more than these."""

_Member = tuple[Tensor, dict[str, Any]]
"""A matrix and its group of parameters."""


@dataclass(frozen=True)
class _Work:
    """A batch of matrices.

    Attributes:
        numbers: of each of its matrices, the place among all.
        batch: how they are exchanged.
        advancing: places in the batch of the matrices whose momentum moves on together.
        applying: places of those whose weights are updated together.
    """

    numbers: list[int]
    batch: Batch
    advancing: list[list[int]]
    applying: list[list[int]]


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
        self._work: tuple[list[int], list[_Work]] = [], []
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
        updates = [self._update(work, [moving[n] for n in work.numbers]) for work in self._divided(moving)]
        # While one batch is orthogonalised, the next is gathered and the one before returns; alike on all ranks.
        for tick in range(len(updates) + 2):
            for update in reversed(updates[max(0, tick - 2) : tick + 1]):
                next(update, None)
        return None

    def _divided(self, moving: list[_Member]) -> list[_Work]:
        """The matrices in batches; computed anew only where others have gradients."""
        known = [id(matrix) for matrix, _ in moving]
        if self._work[0] != known:
            kinds: dict[Any, list[int]] = {}
            placed = place([matrix for matrix, _ in moving], self._group)
            for number, (matrix, group) in enumerate(moving):
                devices = _device(matrix), local_part(matrix).device
                kinds.setdefault((placed[number].group, group["ns_dtype"], *devices), []).append(number)
            works = list[_Work]()
            for (_, dtype, device, home), numbers in kinds.items():
                those = [placed[number] for number in numbers]
                for chosen, batch in divide(those, [_cost(*each.shape) for each in those], dtype, device, home):
                    own = [numbers[index] for index in chosen]
                    members = [moving[number] for number in own]
                    works.append(
                        _Work(
                            own,
                            batch,
                            _chunks(members, lambda matrix, group: (id(group), matrix.dtype)),
                            _chunks(members, lambda matrix, group: (id(group), matrix.dtype, max(matrix.shape))),
                        )
                    )
            self._work = known, works
        return self._work[1]

    def _update(self, work: _Work, members: list[_Member]) -> Iterator[None]:
        """Update a batch of matrices, and pause while something of it is on its way."""
        batch = work.batch
        arriving = batch.gather(self._advance(work, members))
        yield
        own = [group for (_, group), is_mine in zip(members, batch.is_mine, strict=True) if is_mine]
        wholes = zip(arriving(), own, strict=True)
        returning = batch.scatter([orthogonalise(whole, g["ns_steps"], g["ns_dtype"]) for whole, g in wholes])
        yield
        self._apply(work, members, returning())

    def _advance(self, work: _Work, members: list[_Member]) -> list[Tensor]:
        """Move the momentum on, and return this rank's parts that owners orthogonalise, in the type of the iteration.

        One kernel takes many matrices, laid one after another.
        """
        ahead: dict[int, Tensor] = {}
        for numbers in work.advancing:
            matrices, group = [members[number][0] for number in numbers], members[numbers[0]][1]
            velocities = [local_part(self._momentum(matrix)) for matrix in matrices]
            grad = join([local_part(matrix.grad) for matrix in matrices if matrix.grad is not None])
            velocity = join(velocities)
            moved = velocity.lerp(grad, 1 - group["momentum"])
            self._store(velocities, velocity, moved)
            direction = grad.lerp(moved, group["momentum"]) if group["nesterov"] else moved
            parts = cut(direction.to(group["ns_dtype"]), [part.shape for part in velocities])
            ahead.update(zip(numbers, parts, strict=True))
        return [ahead[number] for number, is_given in enumerate(work.batch.is_given) if is_given]

    def _apply(self, work: _Work, members: list[_Member], directions: Sequence[Tensor]) -> None:
        """Decay the weights and add the orthogonalised updates.

        Args:
            work: the batch.
            members: its matrices and their groups.
            directions: this rank's part of each update.
        """
        for numbers in work.applying:
            matrix, group = members[numbers[0]]
            weights = [local_part(members[number][0]) for number in numbers]
            weight, rate = join(weights), group["lr"] * 0.2 * math.sqrt(max(matrix.shape))
            # Of bf16 weights too: `add_` rounds bf16 otherwise at the end of a tensor, and a shard ends elsewhere.
            updated = weight.float() * (1 - group["lr"] * group["weight_decay"])
            updated.add_(join([directions[number] for number in numbers]), alpha=-rate)
            self._store(weights, weight, updated)

    def _store(self, targets: list[Tensor], old: Tensor, new: Tensor) -> None:
        """Give tensors their new numbers, or the old ones if the update is left out; old, new: (elements,), joined."""
        kept = new if self.found_inf is None else torch.where(self.found_inf > 0, old, new)
        torch._foreach_copy_(targets, cut(kept, [target.shape for target in targets]))

    def _momentum(self, matrix: Tensor) -> Tensor:
        """The velocity of a matrix, at first zeros."""
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        velocity: Tensor = state["momentum_buffer"]
        return velocity


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


def _chunks(members: list[_Member], kind: Callable[[Tensor, dict[str, Any]], Hashable]) -> list[list[int]]:
    """Places of the matrices of each kind, as many together as the limit of bytes allows."""
    kinds: dict[Hashable, list[int]] = {}
    for number, member in enumerate(members):
        kinds.setdefault(kind(*member), []).append(number)
    chunks = list[list[int]]()
    for numbers in kinds.values():
        held = 0
        for number in numbers:
            part = local_part(members[number][0])
            size = part.numel() * part.element_size()
            held += size
            if held == size or held > (_HOST_CHUNK_BYTES if part.device.type == "cpu" else _CHUNK_BYTES):
                chunks.append([])
                held = size
            chunks[-1].append(number)
    return chunks


def _device(matrix: Tensor) -> torch.device:
    """Where a matrix is orthogonalised: on the GPU, where its shards are offloaded from one."""
    return torch.device(matrix.device_mesh.device_type) if is_sharded(matrix) else matrix.device


def _cost(rows: int, columns: int) -> float:
    """FLOPs of an iteration, but for a factor."""
    short, long = sorted((rows, columns))
    return short**2 * (2.0 * long + short)
