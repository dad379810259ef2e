"""Progress of long reads of data: a log line every few seconds, and no line for shorter reads."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import TypeVar

from foundry.run_dir.log import NOTICE

SECONDS_BETWEEN_LINES = 5.0
_MB = 10**6
log = logging.getLogger(__name__)
_Item = TypeVar("_Item")


def utf8_bytes(text: str) -> int:
    """Return the size of a text in UTF-8 bytes."""
    return len(text) if text.isascii() else len(text.encode())


class ReadingProgress:
    """Logs progress lines such as `tokenizing: 120 of 500 MB, 24.0 MB/s, 0:00:16 left`.

    Args:
        activity: name of the activity.
        total: total amount, in bytes of text or in rows; None if unknown.
        in_rows: count rows instead of bytes.
        clock: function that returns the time in seconds.
    """

    def __init__(
        self,
        activity: str,
        total: int | None = None,
        *,
        in_rows: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._activity, self._total, self._in_rows, self._clock = activity, total, in_rows, clock
        self._done = 0
        self._start_time = self._last_line_time = clock()

    def over(self, items: Iterable[_Item], size: Callable[[_Item], int] = lambda item: 1) -> Iterator[_Item]:
        """Yield the items, and add the size of each to the progress when the next one is requested."""
        for item in items:
            yield item
            self._done += size(item)
            if (now := self._clock()) - self._last_line_time >= SECONDS_BETWEEN_LINES:
                self._last_line_time = now
                log.log(NOTICE, "%s: %s", self._activity, self._line(now - self._start_time))

    def _line(self, seconds: float) -> str:
        rate = self._done / seconds
        total = "" if self._total is None else f" of {self._amount(self._total)}"
        unit, speed = ("rows", f"{rate:,.0f}") if self._in_rows else ("MB", f"{rate / _MB:,.1f}")
        line = f"{self._amount(self._done)}{total} {unit}, {speed} {unit}/s"
        if self._total is None or not rate:
            return line
        remaining = timedelta(seconds=round(max(0, self._total - self._done) / rate))
        return f"{line}, {remaining} left"

    def _amount(self, amount: int) -> str:
        return f"{amount:,}" if self._in_rows else f"{amount / _MB:,.0f}"
