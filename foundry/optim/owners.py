"""Whole matrices on one rank each: what every rank holds a part of goes to an owner, and results come back as parts.

Two all-to-alls for a batch of matrices, in the same order on all ranks and asynchronous, so that one batch is on its
way while another is computed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from foundry.core.sharded import is_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_BATCH_BYTES = 64 * 2**20
"""Of whole matrices that an owner receives at a time, unless one alone is larger; about three batches are in flight."""

_Part = tuple[slice, slice]


@dataclass(frozen=True)
class Placed:
    """How a matrix lies on the ranks of a group.

    Attributes:
        group: the ranks; None: this process alone.
        rank: this one in the group.
        shape: of the whole matrix.
        parts: the rows and columns of each rank, in the order of the group.
        copies: which copy of the matrix each rank's part belongs to; ranks of one copy make up a whole.
    """

    group: ProcessGroup | None
    rank: int
    shape: tuple[int, int]
    parts: tuple[_Part, ...]
    copies: tuple[tuple[int, ...], ...]

    def numel(self, rank: int) -> int:
        """Elements of a rank's part."""
        rows, columns = self.parts[rank]
        return int((rows.stop - rows.start) * (columns.stop - columns.start))

    def is_whole(self, rank: int) -> bool:
        """Whether a rank holds the whole matrix."""
        return self.numel(rank) == self.shape[0] * self.shape[1]


def place(matrices: Sequence[Tensor], group: ProcessGroup | None) -> list[Placed]:
    """How matrices lie.

    Args:
        matrices: DTensors in any placement by shards, or tensors that are equal on all ranks of `group`.
        group: those that hold a plain tensor; None: this process alone.
    """
    known: dict[Any, Placed] = {}
    placed = []
    for matrix in matrices:
        key: Any = matrix.shape
        if is_sharded(matrix):
            key = matrix.device_mesh, matrix.placements, matrix.shape
        if key not in known:
            known[key] = _place_shards(matrix) if is_sharded(matrix) else _place_copies(matrix, group)
        placed.append(known[key])
    return placed


def _place_copies(matrix: Tensor, group: ProcessGroup | None) -> Placed:
    rows, columns = matrix.shape
    ranks = range(1 if group is None else group.size())
    parts = ((slice(0, rows), slice(0, columns)),) * len(ranks)
    return Placed(group, 0 if group is None else group.rank(), (rows, columns), parts, tuple((r,) for r in ranks))


def _place_shards(matrix: "DTensor") -> Placed:
    rows, columns = matrix.shape
    mesh = matrix.device_mesh
    group = _group(mesh)
    coordinates = [(mesh.mesh == rank).nonzero()[0].tolist() for rank in dist.get_process_group_ranks(group)]
    held = [_part((rows, columns), mesh, matrix.placements, coordinate) for coordinate in coordinates]
    parts, copies = zip(*held, strict=True)
    return Placed(group, group.rank(), (rows, columns), parts, copies)


def _group(mesh: "DeviceMesh") -> ProcessGroup:
    """All ranks of a mesh."""
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() == dist.get_world_size():
        world = dist.group.WORLD
        assert world is not None
        return world
    return mesh._flatten().get_group()


def _part(
    shape: tuple[int, int], mesh: "DeviceMesh", placements: Sequence[Any], coordinate: list[int]
) -> tuple[_Part, tuple[int, ...]]:
    """The part at a coordinate of the mesh, cut as `Tensor.chunk` does, and the number of its copy."""
    from torch.distributed.tensor import Replicate, Shard

    bounds, copy = [[0, shape[0]], [0, shape[1]]], []
    # FSDP2 cuts what tensor parallelism has cut already, and calls that strided: it comes last, though its dimension of
    # the mesh comes first.
    for dim in sorted(range(mesh.ndim), key=lambda dim: not isinstance(placements[dim], (Shard, Replicate))):
        placement, index = placements[dim], coordinate[dim]
        if isinstance(placement, Replicate):
            copy.append(index)
            continue
        start, stop = bounds[placement.dim]
        size = -(-(stop - start) // mesh.size(dim))
        bounds[placement.dim] = [min(start + index * size, stop), min(start + (index + 1) * size, stop)]
    rows, columns = (slice(*bound) for bound in bounds)
    return (rows, columns), tuple(copy)


def assign(costs: Sequence[float], num_ranks: int) -> list[int]:
    """An owner for each of several pieces of work: the largest first, to whoever has the least so far."""
    load, owners = [0.0] * num_ranks, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owner = min(range(num_ranks), key=load.__getitem__)
        owners[index], load[owner] = owner, load[owner] + costs[index]
    return owners


class Batch:
    """Matrices of one group that are exchanged together, each with an owner.

    Args:
        placed: how each lies.
        owners: of each, a rank of the group; in ascending order.
        dtype: in which they travel.
        device: on which they are exchanged.
        home: on which this rank's parts lie: `device`, or the host.

    Attributes:
        is_mine: of each, whether this rank is its owner.
        is_given: of each, whether `gather` takes this rank's part.
    """

    def __init__(
        self,
        placed: Sequence[Placed],
        owners: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        home: torch.device,
    ) -> None:
        self._group, me, ranks = placed[0].group, placed[0].rank, range(len(placed[0].parts))
        self._dtype, self._device, self._home = dtype, device, home
        self._is_offloaded = device.type != home.type
        pairs = list(zip(placed, owners, strict=True))
        self.is_mine = [owner == me for owner in owners]
        owned = [each for each, owner in pairs if owner == me]
        self._shapes = [each.shape for each in owned]
        # Both are known to all ranks alike, so that none waits in a collective that another leaves out.
        self._is_gathered = not all(each.is_whole(owner) for each, owner in pairs)
        self._is_scattered = len(ranks) > 1
        # To an owner go the parts of the copy that it has a part of itself; from it, the parts of all copies.
        sent = [each.copies[me] == each.copies[owner] for each, owner in pairs]
        self.is_given = sent if self._is_gathered else self.is_mine
        self._given = [
            sum(
                each.numel(me)
                for (each, owner), given in zip(pairs, self.is_given, strict=True)
                if given and owner == r
            )
            for r in ranks
        ]
        sources = [(r, n) for r in ranks for n, each in enumerate(owned) if each.copies[r] == each.copies[me]]
        self._sources = [(n, owned[n].parts[r]) for r, n in sources]
        self._taken = [sum(owned[n].numel(r) for source, n in sources if source == r) for r in ranks]
        self._results = [(n, each.parts[r]) for r in ranks for n, each in enumerate(owned)]
        self._returned = [sum(each.numel(r) for each in owned) for r in ranks]
        self._received = [sum(each.numel(me) for each, owner in pairs if owner == r) for r in ranks]
        self._parts = [each.parts[me] for each in placed]

    def gather(self, parts: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Send this rank's parts to the owners of the matrices.

        Args:
            parts: of the matrices with `is_given`, in their order.

        Returns:
            A function that waits for the whole matrices that are this rank's own.
        """
        arriving: Callable[[], Tensor] | None = None
        if self._is_gathered or self._is_offloaded:
            source = self._carry(self._join(parts, self._home), self._device)
            arriving = self._exchange(source, self._given, self._taken) if self._is_gathered else lambda: source

        def assemble() -> list[Tensor]:
            if arriving is None and self._device.type == "cpu":
                return list(parts)
            # Each has memory of its own, which is aligned: kernels of GPUs may sum in another order where it is not.
            wholes = [torch.empty(shape, dtype=self._dtype, device=self._device) for shape in self._shapes]
            places = [wholes[number][part] for number, part in self._sources]
            found = parts if arriving is None else cut(arriving(), [place.shape for place in places])
            if places:
                torch._foreach_copy_(places, list(found))
            return wholes

        return assemble

    def scatter(self, wholes: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Send each rank its parts of the wholes that this one owns.

        Returns:
            A function that waits for this rank's parts of all matrices.
        """
        if not self._is_scattered and not self._is_offloaded:
            return lambda: list(wholes)
        rows = [whole.contiguous() for whole in wholes]
        source = self._join([rows[number][part] for number, part in self._results], self._device)
        wait = self._exchange(source, self._returned, self._received) if self._is_scattered else lambda: source

        def cut_parts() -> list[Tensor]:
            shapes = [[bound.stop - bound.start for bound in part] for part in self._parts]
            return cut(self._carry(wait(), self._home), shapes)

        return cut_parts

    def _join(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        return join([torch.empty(0, dtype=self._dtype, device=device), *tensors])

    def _carry(self, flat: Tensor, device: torch.device) -> Tensor:
        """The same numbers on a device, by one copy from or to pinned memory; the host waits for those that it gets."""
        if flat.device.type == device.type:
            return flat
        if device.type == "cpu":
            return torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True).copy_(flat)
        return flat.pin_memory().to(device, non_blocking=True)

    def _exchange(self, source: Tensor, given: list[int], taken: list[int]) -> Callable[[], Tensor]:
        """Start to send each rank the elements `given` to it, in order; what is returned waits for theirs."""
        target = source.new_empty(sum(taken))
        work = dist.all_to_all_single(target, source, taken, given, group=self._group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return target

        return wait


def join(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors one after another, (elements,): a copy, or a view of one that is alone."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    return torch.cat(flat) if len(flat) > 1 else flat[0]


def cut(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Views of a tensor, (elements,), that hold joined tensors of these shapes."""
    parts = torch.split(flat, [math.prod(shape) for shape in shapes])
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


def divide(
    placed: Sequence[Placed], costs: Sequence[float], dtype: torch.dtype, device: torch.device, home: torch.device
) -> list[tuple[list[int], Batch]]:
    """Give matrices of one group owners, and batch them: the numbers of each batch's matrices, and the batch.

    Args:
        placed: how each lies.
        costs: of each, the work of its owner.
        dtype: in which they travel.
        device: on which they are exchanged.
        home: on which this rank's parts lie.
    """
    owners = assign(costs, len(placed[0].parts))
    batches, held = [list[int]()], [0] * len(placed[0].parts)
    for number in sorted(range(len(placed)), key=lambda number: -costs[number]):
        owner, size = owners[number], math.prod(placed[number].shape) * dtype.itemsize
        if held[owner] and held[owner] + size > _BATCH_BYTES:
            batches.append([])
            held = [0] * len(held)
        batches[-1].append(number)
        held[owner] += size
    for batch in batches:
        batch.sort(key=owners.__getitem__)
    return [(b, Batch([placed[n] for n in b], [owners[n] for n in b], dtype, device, home)) for b in batches]
