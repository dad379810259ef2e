"""Observers never stop a run: what one cannot do, it logs."""

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

Self = TypeVar("Self")
Event = TypeVar("Event")


def tolerant(method: Callable[[Self, Event], None]) -> Callable[[Self, Event], None]:
    """Wrap an observer's method so that an exception becomes a warning, once per observer and kind of error."""

    @functools.wraps(method)
    def told(self: Self, event: Event) -> None:
        try:
            method(self, event)
        except Exception as error:
            said: set[Any] = self.__dict__.setdefault("_errors_said", set())
            if (kind := (method.__name__, type(error))) not in said:
                said.add(kind)
                logging.getLogger(method.__module__).warning(
                    "%s.%s: %s: %s (the run goes on; said once)",
                    type(self).__name__,
                    method.__name__,
                    type(error).__name__,
                    error,
                )

    return told
