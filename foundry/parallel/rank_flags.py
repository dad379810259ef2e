"""What ranks agree on at step boundaries."""

import torch
import torch.distributed as dist

from foundry.parallel.process_group import World


class RankFlags:
    """Combines flags over the ranks, so that all of them see the same value at the same step boundary.

    Its tensors are in host memory, so that no device waits for it. It speaks over the ranks' own group, from the thread
    that trains: every rank makes the same calls in the same order. On one process there is nobody to ask.

    Args:
        world: the ranks; their process group exists already.
    """

    def __init__(self, world: World) -> None:
        self._group = dist.distributed_c10d._get_default_group() if world.world_size > 1 else None
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp(dist.ReduceOp.BOR)
        self._value = torch.zeros((), dtype=torch.int64)
        self._pending: dist.Work | None = None

    def exchange(self, flags: int) -> int:
        """The flags that the ranks gave at the previous call, by bitwise or; on one process, these.

        Their reduction went on during the step between, so nobody waits; these are on their way when this returns. Each
        flag given is seen once, one call late.

        Args:
            flags: this rank's, below 2^63.

        Returns:
            The same on every rank; 0 at the first call.
        """
        if self._group is None:
            return flags
        seen = self._received()
        # The group's own method: torch.distributed.all_reduce around it costs three times as much.
        self._pending = self._group.allreduce([self._value.fill_(flags)], self._options)
        return seen

    def settle(self, flags: int) -> int:
        """The flags of this call and of the one before, without delay: ranks wait for each other."""
        before = self.exchange(flags)
        return before | self._received()

    def _received(self) -> int:
        """Wait for the reduction under way, if there is one."""
        if self._pending is None:
            return 0
        self._pending.wait()
        self._pending = None
        return int(self._value)
