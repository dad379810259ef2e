"""Wrappers that turn the exceptions of observers into warnings, so that a wrapped observer never stops a run."""

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from foundry.core.events import Evaluated, RunEnded, RunStarted, StepLogged

Self = TypeVar("Self")
Event = TypeVar("Event")


def tolerant(method: Callable[[Self, Event], None]) -> Callable[[Self, Event], None]:
    """Wrap an observer's method so that an exception becomes a warning.

    The warning is logged once per observer, method and exception type.
    """

    @functools.wraps(method)
    def call(self: Self, event: Event) -> None:
        try:
            method(self, event)
        except Exception as error:
            logged: set[Any] = self.__dict__.setdefault("_errors_logged", set())
            if (kind := (method.__name__, type(error))) not in logged:
                logged.add(kind)
                logging.getLogger(method.__module__).warning(
                    "%s.%s: %s: %s (the run continues; logged once)",
                    getattr(self, "name", type(self).__name__),
                    method.__name__,
                    type(error).__name__,
                    error,
                )

    return call


class SafeObserver:
    """Wrapper for a user's observer: exceptions become warnings, and missing methods are skipped.

    Args:
        name: name for the warnings.
        observer: the user's observer.
    """

    def __init__(self, name: str, observer: object) -> None:
        self.name, self._observer = name, observer

    @tolerant
    def on_start(self, event: RunStarted) -> None:
        """Forward the event."""
        self._pass("on_start", event)

    @tolerant
    def on_step(self, event: StepLogged) -> None:
        """Forward the event."""
        self._pass("on_step", event)

    @tolerant
    def on_evaluation(self, event: Evaluated) -> None:
        """Forward the event."""
        self._pass("on_evaluation", event)

    @tolerant
    def on_end(self, event: RunEnded) -> None:
        """Forward the event."""
        self._pass("on_end", event)

    def _pass(self, method: str, event: object) -> None:
        if (call := getattr(self._observer, method, None)) is not None:
            call(event)
