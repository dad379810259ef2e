"""Warnings about graphs that torch.compile compiles late in a run."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from foundry.core.errors import counted
from foundry.parallel.compilation import count_graphs

log = logging.getLogger(__name__)

_SETTLING_STEPS = 3
"""Number of first steps that are expected to compile all graphs of a run, including graphs for dynamic shapes."""


class Recompilations:
    """Counts the graphs that are compiled after the first steps.

    Args:
        is_compiled: True if the blocks of the model are compiled; otherwise nothing is counted.
    """

    def __init__(self, *, is_compiled: bool) -> None:
        self._is_compiled = is_compiled
        self._steps = self._count = self._warned = 0

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Return a context for an optimizer step that counts the graphs compiled in it, except in the first steps."""
        num_graphs = count_graphs() if self._is_compiled else 0
        yield
        self._steps += 1
        if self._is_compiled and self._steps > _SETTLING_STEPS:
            self._count += count_graphs() - num_graphs

    def warn(self) -> None:
        """Log a warning if the count has grown since the last call."""
        if self._count > self._warned:
            log.warning(
                "torch.compile has compiled %s after its first %d steps, because batch shapes change;"
                " give all samples one length, or set hparams.torchcompile=false",
                counted(self._count, "more graph"),
                _SETTLING_STEPS,
            )
        self._warned = self._count
