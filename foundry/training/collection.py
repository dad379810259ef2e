"""When Python collects its garbage."""

import gc
from types import TracebackType
from typing import Self

_STEPS_BETWEEN = 50


class CollectedBetweenSteps:
    """Cyclic garbage is collected every 50 steps, by all ranks at the same one, and never within a step.

    Where each rank collects whenever it has allocated enough, all wait for another one in nearly every step. What is
    there when training begins is not looked at again.
    """

    def __enter__(self) -> Self:
        self._was_enabled = gc.isenabled()
        gc.freeze()
        gc.disable()
        return self

    def after_step(self, step: int) -> None:
        """Collect, where it is time."""
        if step % _STEPS_BETWEEN == 0:
            gc.collect()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()
