"""Which ranks are still there, when one has waited for long."""

import json
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from torch._C._distributed_c10d import PrefixStore, Store

_ROUND = "round"


class RollCall:
    """Lets a rank that has waited for long ask the others for a sign of life.

    A daemon thread looks into the store by which the ranks met, and answers for its process if anybody asks: one that
    is stopped, or whose machine is, cannot. While nobody asks nothing is written.

    Args:
        store: the ranks'.
        rank: this one.
        world_size: ranks.
        seconds: between two looks.
        host: the rank in whose process the store lives; None where that is another process, or a file.
        when_asked: called whenever a rank, this one too, asks, in a thread of its own.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        seconds: float,
        host: int | None,
        when_asked: Callable[[], None] | None = None,
    ) -> None:
        # A connection of its own: a rank that waits for the store holds the one it waits by.
        self._store = PrefixStore("roll call", store.clone())  # type: ignore[attr-defined]
        self._rank = rank
        self._world_size = world_size
        self._seconds = seconds
        self._host = host
        self._when_asked = when_asked
        self._wanted = False
        self._asked = 0
        self._answered_to = 0
        self._doing = (0, "starting")
        self._answers = dict[int, tuple[int, str]]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="roll call", daemon=True)

    def ask(self) -> None:
        """Ask all ranks, at the next look."""
        self._asked = 0
        self._answers = {}
        self._wanted = True

    def note(self, step: int, doing: str) -> None:
        """What this rank is at, for its answers."""
        self._doing = (step, doing)

    @property
    def silent(self) -> list[int]:
        """The ranks that have not answered since `ask`; of a store that does not answer either, whose it is."""
        if not self._wanted:
            return []
        if not self._asked:
            return [] if self._host in (None, self._rank) else [self._host]
        return [rank for rank in range(self._world_size) if rank != self._rank and rank not in self._answers]

    @property
    def answers(self) -> dict[int, tuple[int, str]]:
        """The step of each rank that has answered, and what it is doing there."""
        return dict(self._answers)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(min(self._seconds, 1.0))  # a store that is gone may hold the thread for ever

    def _listen(self) -> None:
        while not self._over.wait(self._seconds):
            try:
                self._look()
            except (RuntimeError, ValueError):  # the store is gone, and with it the run: its collectives will say so
                return

    def _look(self) -> None:
        if self._wanted and not self._asked:
            self._asked = self._store.add(_ROUND, 1)
        if not self._store.check([_ROUND]):
            return
        if (latest := int(self._store.get(_ROUND))) > self._answered_to:
            self._store.set(str(self._rank), json.dumps([latest, *self._doing]))
            self._answered_to = latest
            if self._when_asked is not None:  # a file system that hangs would keep this thread from answering
                threading.Thread(target=self._when_asked, name="asked", daemon=True).start()
        if self._asked:
            for rank in self.silent:
                if self._store.check([str(rank)]):
                    number, step, doing = json.loads(self._store.get(str(rank)))
                    if number >= self._asked:
                        self._answers[rank] = (step, doing)
