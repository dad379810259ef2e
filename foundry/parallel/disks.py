"""Disks of a run's nodes, if the nodes do not share the run directory."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Disks:
    """Disks that contain a run directory of the same path, and the ranks that use each of them.

    Attributes:
        leaders: for each rank, the lowest rank on the same disk, which creates and deletes the files that belong to no
            single rank.
        group: process group of the leaders; on other ranks it is not used.
    """

    leaders: tuple[int, ...]
    group: ProcessGroup | None = None

    @property
    def of_leaders(self) -> Sequence[int]:
        """Leaders of all disks, in ascending order; rank 0 is the first."""
        return sorted(set(self.leaders))

    def peers(self, rank: int) -> Sequence[int]:
        """Return the ranks on the disk of a rank, in ascending order."""
        return [other for other, leader in enumerate(self.leaders) if leader == self.leaders[rank]]
