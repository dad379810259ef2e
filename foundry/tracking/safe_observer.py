"""Observers never stop a run: what one cannot do, it logs."""

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from foundry.core.events import Evaluated, RunEnded, RunStarted, StepLogged

Self = TypeVar("Self")
Event = TypeVar("Event")


def tolerant(method: Callable[[Self, Event], None]) -> Callable[[Self, Event], None]:
    """Wrap an observer's method so that an exception becomes a warning, once per observer and kind of error."""

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
    """Any observer, made safe: its errors become warnings, and it need not have every method.

    Args:
        name: for the warnings.
        observer: a part of the user's own.
    """

    def __init__(self, name: str, observer: object) -> None:
        self.name, self._observer = name, observer

    @tolerant
    def on_start(self, event: RunStarted) -> None:
        """Pass it on."""
        self._pass("on_start", event)

    @tolerant
    def on_step(self, event: StepLogged) -> None:
        """Pass it on."""
        self._pass("on_step", event)

    @tolerant
    def on_evaluation(self, event: Evaluated) -> None:
        """Pass it on."""
        self._pass("on_evaluation", event)

    @tolerant
    def on_end(self, event: RunEnded) -> None:
        """Pass it on."""
        self._pass("on_end", event)

    def _pass(self, method: str, event: object) -> None:
        if (call := getattr(self._observer, method, None)) is not None:
            call(event)
