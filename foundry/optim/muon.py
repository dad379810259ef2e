"""Muon optimizer for matrices that may be sharded.

`torch.optim.Muon` multiplies the shards of a matrix through DTensor in bfloat16, which rounds partial products before
they are summed: after three steps, the weights of a run on two ranks differ from a run on one rank by 1e-3. Here each
update is gathered and orthogonalized as a whole matrix; momentum and weights stay sharded. One rank orthogonalizes each
matrix. The update is sent in the dtype of the iteration, because the iteration rounds it to this dtype anyway.

On CPUs, equal gradients give equal updates for any number of ranks, in fp32 and in bfloat16. A GPU orthogonalizes
matrices of equal shape as a stack, whose size depends on the number of ranks, so updates agree up to rounding. If
gradients differ in the last bit, for example because of another summation order, the difference of the updates is at
most 3.4445^5 = 485 times as large in fp32. In bfloat16 a difference may also change how a value is rounded, and the
weak singular directions consist of these rounding errors.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from foundry.core.sharded import is_sharded, local_part, reduced_zeros
from foundry.optim.eager import EagerOptimizer
from foundry.optim.owners import Batch, divide, join, place, unflatten

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_CHUNK_BYTES = 64 * 2**20
"""Maximum size of the parts of matrices whose momentum or weights are updated together; a larger part is alone.

An update needs up to four times as much memory.
"""
_HOST_CHUNK_BYTES = 64 * 2**10
"""Limit like `_CHUNK_BYTES`, for parts of matrices on a CPU.

Concatenating saves calls, but copying more than the CPU's cache holds costs more than the saved calls.
"""

_SMALLEST_VARIANCE = 1e-10
"""Lower bound of the mean squares of rows in a division; the mean square of a row is about 1 / `max(shape)`."""

Member = tuple[Tensor, dict[str, Any]]
"""A tensor and its parameter group."""


@dataclass(frozen=True)
class _Work:
    """A batch of matrices.

    Attributes:
        numbers: index of each matrix of the batch in the list of all matrices.
        batch: exchange of the matrices between ranks.
        rows: exchange of the mean squares of the rows; None without row normalization.
        momentum_chunks: indices into the batch, in groups of matrices whose momentum is updated together.
        weight_chunks: indices into the batch, in groups of matrices whose weights are updated together.
    """

    numbers: list[int]
    batch: Batch
    rows: Batch | None
    momentum_chunks: list[list[int]]
    weight_chunks: list[list[int]]


class Muon(EagerOptimizer):
    """Momentum with orthogonalized updates (Jordan et al., 2024).

    In bfloat16 on one process the results equal `torch.optim.Muon` bit for bit. Updates are scaled to the RMS of
    AdamW's updates (Liu et al., 2025), so that both optimizers use the same learning rate, and weight decay is
    decoupled. Each matrix is orthogonalized by one rank, with the work balanced over the ranks.

    With `row_variance_decay`, the owner also normalizes the rows of each update (`normalise_rows`). The averages of a
    matrix are one column in fp32, sharded like the rows of the matrix; the owner gathers it and sends the new values
    back. So checkpoints contain it as any other state, and results do not depend on the number of ranks.

    Args:
        params: matrices or parameter groups; DTensors may be sharded in any way.
        lr: learning rate.
        momentum: decay of the momentum buffer.
        nesterov: use Nesterov momentum.
        ns_steps: number of Newton-Schulz iterations.
        ns_dtype: dtype of the Newton-Schulz iterations: float32 or bfloat16.
        weight_decay: decoupled weight decay, multiplied by the learning rate.
        cautious_weight_decay: decay only the elements that the update moves towards zero, which have the sign of the
            update that is subtracted, or where one of the two is 0 (Chen et al., 2025, arXiv 2510.12402).
        row_variance_decay: decay of the averages that normalize the rows of an orthogonalized update (Li et
            al., 2025, arXiv 2510.05491); None leaves the rows as they are.
        group: ranks that hold equal plain matrices and gradients, as with DDP, and share the work; None makes each rank
            orthogonalize all plain matrices. For DTensors the ranks of their mesh share the work.
    """

    # Like torch's fused optimizers, this one skips the update if `found_inf` is 1, without a device synchronization.
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
        cautious_weight_decay: bool = False,
        row_variance_decay: float | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "ns_steps": ns_steps, "ns_dtype": ns_dtype})
        self.found_inf: Tensor | None = None
        self._group = group
        self._decays_cautiously = cautious_weight_decay
        self._normalises_rows = row_variance_decay is not None
        self._row_variance_decay = row_variance_decay or 0.0
        self._work: tuple[list[int], list[_Work]] = [], []
        for param_group in self.param_groups:
            assert all(p.ndim == 2 for p in param_group["params"]), "Muon is for matrices"

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all matrices that have gradients."""
        assert closure is None, "the loss is evaluated once a step"
        members = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        updates = [self._update(work, [members[n] for n in work.numbers]) for work in self._divide_work(members)]
        # While one batch is orthogonalized, the next is gathered and the previous one scattered, in the same order on
        # all ranks.
        for tick in range(len(updates) + 2):
            for update in reversed(updates[max(0, tick - 2) : tick + 1]):
                next(update, None)
        return None

    def _divide_work(self, all_members: list[Member]) -> list[_Work]:
        """Return the matrices in batches, which are recomputed only if the set of matrices with gradients changes."""
        matrix_ids = [id(matrix) for matrix, _ in all_members]
        if self._work[0] != matrix_ids:
            kinds: dict[Any, list[int]] = {}
            layouts = place([matrix for matrix, _ in all_members], self._group)
            for number, (matrix, group) in enumerate(all_members):
                devices = _device(matrix), local_part(matrix).device
                kinds.setdefault((layouts[number].group, group["ns_dtype"], *devices), []).append(number)
            works = list[_Work]()
            for (_, dtype, device, home), numbers in kinds.items():
                batch_layouts = [layouts[number] for number in numbers]
                for indices, batch in divide(
                    batch_layouts, [_cost(*layout.shape) for layout in batch_layouts], dtype, device, home
                ):
                    batch_numbers = [numbers[index] for index in indices]
                    members = [all_members[number] for number in batch_numbers]
                    works.append(
                        _Work(
                            batch_numbers,
                            batch,
                            self._exchange_of_rows(batch, [matrix for matrix, _ in members], device, home),
                            chunks(members, lambda matrix, group: (id(group), matrix.dtype)),
                            chunks(members, lambda matrix, group: (id(group), matrix.dtype, max(matrix.shape))),
                        )
                    )
            self._work = matrix_ids, works
        return self._work[1]

    def _exchange_of_rows(
        self, batch: Batch, matrices: list[Tensor], device: torch.device, home: torch.device
    ) -> Batch | None:
        """Return the exchange of the mean squares of the rows of a batch, with the same owners."""
        if not self._normalises_rows:
            return None
        layouts = place([self._state_of(matrix)["row_variance"] for matrix in matrices], self._group)
        return Batch(layouts, batch.owners, torch.float32, device, home)

    def _update(self, work: _Work, members: list[Member]) -> Iterator[None]:
        """Update a batch of matrices; yields while a transfer is in progress."""
        batch, rows = work.batch, work.rows
        finish_gather = batch.gather(self._advance(work, members))
        variances = [] if rows is None else [local_part(self._state_of(m)["row_variance"]) for m, _ in members]
        if rows is not None:
            finish_gather_rows = rows.gather([v for v, is_sent in zip(variances, rows.is_sent, strict=True) if is_sent])
        yield
        num_steps = [group["ns_steps"] for (_, group), is_mine in zip(members, batch.is_mine, strict=True) if is_mine]
        directions = _orthogonalise_all(finish_gather(), num_steps, members[0][1]["ns_dtype"])
        if rows is not None:
            directions, averages = normalise_rows(directions, finish_gather_rows(), self._row_variance_decay)
            finish_scatter_rows = rows.scatter(averages)
        finish_scatter = batch.scatter(directions)
        yield
        self._apply(work, members, finish_scatter())
        if rows is not None:
            self._store(variances, join(variances), join(finish_scatter_rows()))

    def _advance(self, work: _Work, members: list[Member]) -> list[Tensor]:
        """Update the momentum and return this rank's parts to be orthogonalized, in the dtype of the iteration.

        Matrices are concatenated so that one kernel processes many of them.
        """
        ahead: dict[int, Tensor] = {}
        for numbers in work.momentum_chunks:
            matrices, group = [members[number][0] for number in numbers], members[numbers[0]][1]
            velocities = [local_part(self._state_of(matrix)["momentum_buffer"]) for matrix in matrices]
            grad = join([local_part(matrix.grad) for matrix in matrices if matrix.grad is not None])
            velocity = join(velocities)
            new_velocity = velocity.lerp(grad, 1 - group["momentum"])
            self._store(velocities, velocity, new_velocity)
            direction = grad.lerp(new_velocity, group["momentum"]) if group["nesterov"] else new_velocity
            parts = unflatten(direction.to(group["ns_dtype"]), [part.shape for part in velocities])
            ahead.update(zip(numbers, parts, strict=True))
        return [ahead[number] for number, is_sent in enumerate(work.batch.is_sent) if is_sent]

    def _apply(self, work: _Work, members: list[Member], directions: Sequence[Tensor]) -> None:
        """Apply weight decay and add the orthogonalized updates.

        Args:
            work: the batch.
            members: the matrices of the batch and their parameter groups.
            directions: this rank's part of each update.
        """
        for numbers in work.weight_chunks:
            matrix, group = members[numbers[0]]
            weights = [local_part(members[number][0]) for number in numbers]
            weight, rate = join(weights), group["lr"] * 0.2 * math.sqrt(max(matrix.shape))
            # Computed in fp32 for bf16 weights too: the bf16 `add_` rounds differently at the end of a tensor, and
            # shards end at different places.
            updated = weight.float() * (1 - group["lr"] * group["weight_decay"])
            direction = join([directions[number] for number in numbers])
            if self._decays_cautiously:
                updated = torch.where(direction * weight.float() >= 0, updated, weight.float())
            updated.add_(direction, alpha=-rate)
            self._store(weights, weight, updated)

    def _store(self, targets: list[Tensor], old: Tensor, new: Tensor) -> None:
        """Write new values to tensors, or the old values if the update is skipped because `found_inf` is above 0.

        `old` and `new` are the concatenated values of all tensors, (elements,).
        """
        values = new if self.found_inf is None else torch.where(self.found_inf > 0, old, new)
        torch._foreach_copy_(targets, unflatten(values, [target.shape for target in targets]))

    def _state_of(self, matrix: Tensor) -> dict[str, Tensor]:
        """Return the momentum and, with row normalization, the (rows, 1) mean squares of a matrix, initially zeros."""
        state: dict[str, Tensor] = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
            if self._normalises_rows:
                state["row_variance"] = reduced_zeros(matrix, (matrix.size(0), 1), torch.float32)
        return state


def orthogonalise(matrix: Tensor, num_steps: int, dtype: torch.dtype) -> Tensor:
    """Return roughly the nearest semi-orthogonal matrix: singular values end up between about 0.7 and 1.2.

    Runs a quintic Newton-Schulz iteration with the coefficients of https://kellerjordan.github.io/posts/muon.

    Args:
        matrix: (rows, columns), or a stack of matrices, (matrices, rows, columns); floating point.
        num_steps: number of iterations.
        dtype: dtype of the iteration.

    Returns:
        A tensor of the shape of `matrix` and of `dtype`.
    """
    a, b, c = _COEFFICIENTS
    tall = matrix.size(-2) > matrix.size(-1)
    add_product = torch.addmm if matrix.ndim == 2 else torch.baddbmm
    x = matrix.to(dtype)
    x = x.mT if tall else x
    # The iteration converges for singular values of at most about 1.
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _orthogonalise_all(matrices: Sequence[Tensor], num_steps: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Orthogonalize matrices of one device, each with its number of iterations.

    On a GPU, matrices of equal shape are stacked: a kernel for each of them would take the host longer than the device.
    Products of a stack may be rounded differently from those of one matrix.
    """
    stacks = dict[Hashable, list[int]]()
    for index, matrix in enumerate(matrices):
        stacks.setdefault(index if matrix.device.type == "cpu" else (matrix.shape, num_steps[index]), []).append(index)
    directions = dict[int, Tensor]()
    for indices in stacks.values():
        stack = matrices[indices[0]] if len(indices) == 1 else torch.stack([matrices[index] for index in indices])
        direction = orthogonalise(stack, num_steps[indices[0]], dtype)
        directions.update(zip(indices, [direction] if len(indices) == 1 else direction.unbind(), strict=True))
    return [directions[index] for index in range(len(matrices))]


def normalise_rows(
    updates: Sequence[Tensor], variances: Sequence[Tensor], decay: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Divide each row by the root of an average of its mean square over the steps, and restore the norm of the update.

    This is the normalization of NorMuon (Li et al., 2025, arXiv 2510.05491). The average v of a row with the mean
    square m becomes decay v + (1 - decay) m. It starts at 0; a correction for the start would multiply all rows by the
    same factor, and has no effect since the norm is restored.

    Args:
        updates: (rows, columns) each, orthogonalized.
        variances: (rows, 1) float32 each, averages of the mean squares of the rows.
        decay: decay of the averages.

    Returns:
        The normalized updates, of the dtype of the updates, and the new averages.
    """
    if not updates:
        return [], []
    norms = [torch.linalg.vector_norm(update, dim=1, keepdim=True, dtype=torch.float32) for update in updates]
    squares = torch._foreach_mul(norms, norms)
    means = torch._foreach_div(squares, [update.size(1) for update in updates])
    averages = torch._foreach_lerp(list(variances), means, 1 - decay)
    divisors = torch._foreach_clamp_min(averages, _SMALLEST_VARIANCE)
    shares = torch._foreach_div(squares, divisors)
    factors = [
        (square.sum() / share.sum().clamp(min=_SMALLEST_VARIANCE) / divisor).sqrt()
        for square, share, divisor in zip(squares, shares, divisors, strict=True)
    ]
    return [(update * f).to(update.dtype) for update, f in zip(updates, factors, strict=True)], list(averages)


def chunks(members: list[Member], kind: Callable[[Tensor, dict[str, Any]], Hashable]) -> list[list[int]]:
    """Group tensors by kind, and split each group into chunks of at most the limit in bytes, or of one tensor.

    Args:
        members: tensors with their parameter groups.
        kind: returns a value that is equal for the tensors that may share a chunk.

    Returns:
        The indices of the members of each chunk.
    """
    kinds: dict[Hashable, list[int]] = {}
    for number, member in enumerate(members):
        kinds.setdefault(kind(*member), []).append(number)
    chunks = list[list[int]]()
    for numbers in kinds.values():
        chunk_bytes = 0
        for number in numbers:
            part = local_part(members[number][0])
            size = part.numel() * part.element_size()
            chunk_bytes += size
            if chunk_bytes == size or chunk_bytes > (_HOST_CHUNK_BYTES if part.device.type == "cpu" else _CHUNK_BYTES):
                chunks.append([])
                chunk_bytes = size
            chunks[-1].append(number)
    return chunks


def _device(matrix: Tensor) -> torch.device:
    """Return the device on which a matrix is orthogonalized: its own, or the GPU if its shards are offloaded to CPU."""
    return torch.device(matrix.device_mesh.device_type) if is_sharded(matrix) else matrix.device


def _cost(rows: int, columns: int) -> float:
    """Return the FLOPs of a Newton-Schulz iteration on a matrix, up to a constant factor."""
    short, long = sorted((rows, columns))
    return short**2 * (2.0 * long + short)
