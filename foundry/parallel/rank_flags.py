"""Flags that ranks combine at step boundaries."""

import torch
import torch.distributed as dist

from foundry.parallel.process_group import World


class RankFlags:
    """Combines flags over the ranks, so that all ranks see the same value at the same step boundary.

    Tensors are in host memory, so there is no device synchronization. The training thread makes the calls, and they use
    the default process group: every rank must make the same calls in the same order. A single process does not
    communicate.

    Args:
        world: the ranks; their process group must exist.
    """

    def __init__(self, world: World) -> None:
        self._group = dist.distributed_c10d._get_default_group() if world.world_size > 1 else None
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp(dist.ReduceOp.BOR)
        self._value = torch.zeros((), dtype=torch.int64)
        self._pending: dist.Work | None = None

    def exchange(self, flags: int) -> int:
        """Start combining this call's flags over the ranks by bitwise or, and return the previous call's result.

        The reduction runs during the step between two calls, so no rank waits. Every flag is seen once, one call late.
        On a single process the flags are returned immediately.

        Args:
            flags: flags of this rank, below 2^63.

        Returns:
            The same value on every rank; with several ranks, 0 at the first call and after `settle`.
        """
        if self._group is None:
            return flags
        seen = self._received()
        # The group's own method: torch.distributed.all_reduce takes three times as long.
        self._pending = self._group.allreduce([self._value.fill_(flags)], self._options)
        return seen

    def settle(self, flags: int) -> int:
        """Return the flags of this call and the previous one, combined without delay; ranks wait for each other."""
        exchanged = self.exchange(flags)
        return exchanged | self._received()

    def _received(self) -> int:
        """Wait for the pending reduction and return its result; 0 if no reduction is pending."""
        if self._pending is None:
            return 0
        self._pending.wait()
        self._pending = None
        return int(self._value)
