"""Exchange of sharded matrices: each matrix is gathered whole on one owner rank, and its results are scattered back.

A batch of matrices takes two all-to-alls. They run asynchronously and in the same order on all ranks, so that one batch
is transferred while another is computed.
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
"""Maximum size of the whole matrices that an owner receives in a batch, unless a single matrix is larger.

About three batches are in flight.
"""

_Part = tuple[slice, slice]


@dataclass(frozen=True)
class MatrixLayout:
    """Layout of a matrix on the ranks of a group.

    Attributes:
        group: process group; None for this process only.
        rank: this process's rank in the group.
        shape: shape of the whole matrix.
        parts: the rows and columns that each rank holds, in the order of the group.
        copies: identifier of the replica that each rank's part belongs to; the ranks of one replica hold the whole
            matrix together.
    """

    group: ProcessGroup | None
    rank: int
    shape: tuple[int, int]
    parts: tuple[_Part, ...]
    copies: tuple[tuple[int, ...], ...]

    def numel(self, rank: int) -> int:
        """Return the number of elements in a rank's part."""
        rows, columns = self.parts[rank]
        return int((rows.stop - rows.start) * (columns.stop - columns.start))

    def is_whole(self, rank: int) -> bool:
        """Return whether a rank holds the whole matrix."""
        return self.numel(rank) == self.shape[0] * self.shape[1]


def place(matrices: Sequence[Tensor], group: ProcessGroup | None) -> list[MatrixLayout]:
    """Return the layout of each matrix.

    Args:
        matrices: DTensors with sharded or replicated placements, or plain tensors that are equal on all ranks of
            `group`.
        group: ranks that hold the plain tensors; None for this process only.
    """
    cache: dict[Any, MatrixLayout] = {}
    layouts = []
    for matrix in matrices:
        key: Any = matrix.shape
        if is_sharded(matrix):
            key = matrix.device_mesh, matrix.placements, matrix.shape
        if key not in cache:
            cache[key] = _place_shards(matrix) if is_sharded(matrix) else _place_copies(matrix, group)
        layouts.append(cache[key])
    return layouts


def _place_copies(matrix: Tensor, group: ProcessGroup | None) -> MatrixLayout:
    rows, columns = matrix.shape
    ranks = range(1 if group is None else group.size())
    parts = ((slice(0, rows), slice(0, columns)),) * len(ranks)
    return MatrixLayout(group, 0 if group is None else group.rank(), (rows, columns), parts, tuple((r,) for r in ranks))


def _place_shards(matrix: "DTensor") -> MatrixLayout:
    rows, columns = matrix.shape
    mesh = matrix.device_mesh
    group = _group(mesh)
    coordinates = [(mesh.mesh == rank).nonzero()[0].tolist() for rank in dist.get_process_group_ranks(group)]
    pairs = [_part((rows, columns), mesh, matrix.placements, coordinate) for coordinate in coordinates]
    parts, copies = zip(*pairs, strict=True)
    return MatrixLayout(group, group.rank(), (rows, columns), parts, copies)


def _group(mesh: "DeviceMesh") -> ProcessGroup:
    """Return the process group with all ranks of a mesh."""
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
    """Return the part at a coordinate of the mesh, sharded as by `Tensor.chunk`, and the identifier of its replica."""
    from torch.distributed.tensor import Replicate, Shard

    bounds, copy = [[0, shape[0]], [0, shape[1]]], []
    # FSDP2 shards tensors that tensor parallelism has sharded before, with a strided placement. This placement must be
    # applied last, although its mesh dimension comes first.
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
    """Assign an owner to each piece of work: largest first, to the rank with the smallest load so far."""
    load, owners = [0.0] * num_ranks, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owner = min(range(num_ranks), key=load.__getitem__)
        owners[index], load[owner] = owner, load[owner] + costs[index]
    return owners


class Batch:
    """Matrices of one group that are exchanged together, each with an owner.

    Args:
        layouts: layout of each matrix.
        owners: owner of each matrix, a rank of the group; in ascending order.
        dtype: dtype of the exchange.
        device: device of the exchange.
        home: device of this rank's parts: `device` or the CPU.

    Attributes:
        owners: owner of each matrix, as given.
        is_mine: whether this rank owns the matrix, for each matrix.
        is_sent: whether `gather` takes this rank's part of the matrix, for each matrix.
    """

    def __init__(
        self,
        layouts: Sequence[MatrixLayout],
        owners: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        home: torch.device,
    ) -> None:
        self._group, rank, ranks = layouts[0].group, layouts[0].rank, range(len(layouts[0].parts))
        self._dtype, self._device, self._home = dtype, device, home
        self._is_offloaded = device.type != home.type
        pairs = list(zip(layouts, owners, strict=True))
        self.owners = owners
        self.is_mine = [owner == rank for owner in owners]
        owned_layouts = [layout for layout, owner in pairs if owner == rank]
        self._shapes = [layout.shape for layout in owned_layouts]
        # The next two flags are the same on all ranks; otherwise a rank could wait in a collective that another skips.
        self._is_gathered = not all(layout.is_whole(owner) for layout, owner in pairs)
        self._is_scattered = len(ranks) > 1
        # The owner receives only the parts of its replica, and sends results to all replicas.
        has_copy = [layout.copies[rank] == layout.copies[owner] for layout, owner in pairs]
        self.is_sent = has_copy if self._is_gathered else self.is_mine
        self._send_counts = [
            sum(
                layout.numel(rank)
                for (layout, owner), is_sent in zip(pairs, self.is_sent, strict=True)
                if is_sent and owner == r
            )
            for r in ranks
        ]
        sources = [
            (r, n) for r in ranks for n, layout in enumerate(owned_layouts) if layout.copies[r] == layout.copies[rank]
        ]
        self._sources = [(n, owned_layouts[n].parts[r]) for r, n in sources]
        self._receive_counts = [sum(owned_layouts[n].numel(r) for source, n in sources if source == r) for r in ranks]
        self._results = [(n, layout.parts[r]) for r in ranks for n, layout in enumerate(owned_layouts)]
        self._return_send_counts = [sum(layout.numel(r) for layout in owned_layouts) for r in ranks]
        self._return_receive_counts = [sum(layout.numel(rank) for layout, owner in pairs if owner == r) for r in ranks]
        self._parts = [layout.parts[rank] for layout in layouts]

    def gather(self, parts: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Send this rank's parts to the owners of the matrices.

        Args:
            parts: this rank's parts of the matrices whose `is_sent` is true, in the order of the batch.

        Returns:
            A function that waits for the whole matrices owned by this rank and returns them.
        """
        wait_for_data: Callable[[], Tensor] | None = None
        if self._is_gathered or self._is_offloaded:
            source = self._carry(self._join(parts, self._home), self._device)
            wait_for_data = (
                self._exchange(source, self._send_counts, self._receive_counts) if self._is_gathered else lambda: source
            )

        def assemble() -> list[Tensor]:
            if wait_for_data is None and self._device.type == "cpu":
                return list(parts)
            # Each matrix gets its own, aligned memory: GPU kernels may sum unaligned memory in a different order.
            matrices = [torch.empty(shape, dtype=self._dtype, device=self._device) for shape in self._shapes]
            places = [matrices[number][part] for number, part in self._sources]
            tensors = parts if wait_for_data is None else unflatten(wait_for_data(), [place.shape for place in places])
            if places:
                torch._foreach_copy_(places, list(tensors))
            return matrices

        return assemble

    def scatter(self, matrices: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Send each rank its parts of the whole matrices that this rank owns.

        Returns:
            A function that waits for this rank's parts of all matrices and returns them.
        """
        if not self._is_scattered and not self._is_offloaded:
            return lambda: list(matrices)
        rows = [matrix.contiguous() for matrix in matrices]
        source = self._join([rows[number][part] for number, part in self._results], self._device)
        wait = (
            self._exchange(source, self._return_send_counts, self._return_receive_counts)
            if self._is_scattered
            else lambda: source
        )

        def split_parts() -> list[Tensor]:
            shapes = [[bound.stop - bound.start for bound in part] for part in self._parts]
            return unflatten(self._carry(wait(), self._home), shapes)

        return split_parts

    def _join(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        return join([torch.empty(0, dtype=self._dtype, device=device), *tensors])

    def _carry(self, flat: Tensor, device: torch.device) -> Tensor:
        """Return `flat` on a device, copied through pinned memory if it is on another; copies to a CPU block."""
        if flat.device.type == device.type:
            return flat
        if device.type == "cpu":
            return torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True).copy_(flat)
        return flat.pin_memory().to(device, non_blocking=True)

    def _exchange(self, source: Tensor, send_counts: list[int], receive_counts: list[int]) -> Callable[[], Tensor]:
        """Start an all-to-all and return a function that waits for its result.

        Args:
            source: (elements,), the elements for each rank, in rank order.
            send_counts: number of elements sent to each rank.
            receive_counts: number of elements received from each rank.
        """
        target = source.new_empty(sum(receive_counts))
        work = dist.all_to_all_single(target, source, receive_counts, send_counts, group=self._group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return target

        return wait


def join(tensors: Sequence[Tensor]) -> Tensor:
    """Flatten and concatenate tensors, (elements,); a single tensor is returned as a view."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    return torch.cat(flat) if len(flat) > 1 else flat[0]


def unflatten(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Split a flat tensor, (elements,), into views of the given shapes; the inverse of `join`."""
    parts = torch.split(flat, [math.prod(shape) for shape in shapes])
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


def divide(
    layouts: Sequence[MatrixLayout],
    costs: Sequence[float],
    dtype: torch.dtype,
    device: torch.device,
    home: torch.device,
) -> list[tuple[list[int], Batch]]:
    """Assign owners to matrices of one group and batch them.

    Return the matrix indices and the `Batch` of each batch.

    Args:
        layouts: layout of each matrix.
        costs: cost of processing each matrix.
        dtype: dtype of the exchange.
        device: device of the exchange.
        home: device of this rank's parts.
    """
    owners = assign(costs, len(layouts[0].parts))
    batches, batch_bytes = [list[int]()], [0] * len(layouts[0].parts)
    for number in sorted(range(len(layouts)), key=lambda number: -costs[number]):
        owner, size = owners[number], math.prod(layouts[number].shape) * dtype.itemsize
        if batch_bytes[owner] and batch_bytes[owner] + size > _BATCH_BYTES:
            batches.append([])
            batch_bytes = [0] * len(batch_bytes)
        batches[-1].append(number)
        batch_bytes[owner] += size
    for batch in batches:
        batch.sort(key=owners.__getitem__)
    return [(b, Batch([layouts[n] for n in b], [owners[n] for n in b], dtype, device, home)) for b in batches]
