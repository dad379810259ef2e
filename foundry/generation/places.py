"""Places of a batch, and the prompts that wait for them."""

from collections.abc import Sequence


class Places:
    """Places for prompts that are continued together, and the prompts that wait for one.

    Prompts enter in order, several at a time, because each entry copies the cache of the batch: at least a quarter of
    the places has to be free, or enough for all waiting prompts. Adjacent equal prompts, which are read once if they
    enter together, are separated only if a quarter of the places would stay free otherwise.

    Args:
        prompts: token ids of each prompt.
        count: number of places, at least 1.
        joins: whether prompts can enter while other prompts are continued; if false, all places have to be free.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], count: int, *, joins: bool) -> None:
        self._prompts, self._count, self._joins = prompts, count, joins
        self._quarter = -(-count // 4)
        self._next = 0

    def enter(self, num_taken: int) -> range:
        """Return the indices of the prompts that enter now, and count them as entered.

        Args:
            num_taken: number of places that are not free.
        """
        free, first = self._count - num_taken, self._next
        waiting = len(self._prompts) - first
        if free < min(self._quarter, waiting) or (num_taken and not self._joins):
            return range(0)
        self._next = self._end(first, free)
        return range(first, self._next)

    def _end(self, first: int, free: int) -> int:
        """Return the end of the prompts that enter `free` places, beginning with the prompt `first`."""
        end = group = min(first + free, len(self._prompts))
        if end == len(self._prompts):
            return end
        while group > first and self._prompts[group] == self._prompts[group - 1]:
            group -= 1
        return group if first < group and first + free - group < self._quarter else end
