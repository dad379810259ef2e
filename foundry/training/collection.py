"""Control of Python's garbage collector during training."""

import gc
from types import TracebackType
from typing import Self

_STEPS_BETWEEN = 50


class CollectedBetweenSteps:
    """Context manager that collects cyclic garbage every 50 steps on all ranks at once, and never within a step.

    If each rank collected whenever it had allocated enough objects, all ranks would wait for some collecting rank in
    nearly every step. Objects that exist when training begins are frozen, so collections during training skip them.
    """

    def __enter__(self) -> Self:
        self._was_enabled = gc.isenabled()
        gc.freeze()
        gc.disable()
        return self

    def after_step(self, step: int) -> None:
        """Collect garbage if `step` is a multiple of 50."""
        if step % _STEPS_BETWEEN == 0:
            gc.collect()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()
