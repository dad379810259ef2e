"""Watchdog that ends a stalled rank with a diagnosis, and translation of errors from failed collectives."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

import torch.distributed as dist

from foundry.core.exit_codes import ExitCode

_TICKS = 12
"""Minimum number of checks within the timeout."""
_LONGEST_TICK = 5.0  # seconds
_RECORDING_SECONDS = 5.0

# Fragments of the messages of errors from gloo and torch's stores; gloo raises a plain RuntimeError.
_COLLECTIVE_MESSAGES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "Timed out after",
    "Application timeout caused pair closure",
    "Gloo connectFullMesh failed",
    "wait timeout after",
    "timed out",
)


class CollectiveError(RuntimeError):
    """Failure of a collective: another rank died, or did not join in time."""


class Watchdog:
    """Ends this process with a diagnosis if it makes no progress within the timeout.

    The other ranks then fail in their collectives, or their launcher ends them. The watchdog is a daemon thread. It
    needs the main thread only to release the interpreter lock, which every blocking collective does. Time during which
    the process itself is stopped, for example by Ctrl-Z, does not count.

    A rank without a heartbeat for half of the timeout dumps its position; every rank that waits for another does so. A
    rank without a dump is silent: it is stopped, busy or unreachable, and the other ranks are waiting for it.

    Args:
        timeout_seconds: longest time between heartbeats.
        rank: rank of this process, for the message.
        world_size: number of ranks.
        start_timeout_seconds: timeout until `started` is called; None uses `timeout_seconds`.
        dump: saves the position of this rank, given the optimizer step and the activity. Called after half of the
            timeout if there are other ranks, and before the watchdog ends the process.
        read_dumps: returns optimizer step and activity of the recent dumps, by rank; None if this rank has no dump.
        record: saves the rank at fault, the message and the main thread's stack; must return within seconds.
        when_started: called once, by `started`.
        on_heartbeat: called with the arguments of each `heartbeat`.
    """

    def __init__(
        self,
        timeout_seconds: float,
        rank: int,
        *,
        world_size: int = 1,
        start_timeout_seconds: float | None = None,
        dump: Callable[[int, str], None] | None = None,
        read_dumps: Callable[[], Mapping[int, tuple[int, str]] | None] | None = None,
        record: Callable[[int, str, str], None] | None = None,
        when_started: Callable[[], None] | None = None,
        on_heartbeat: Callable[[int, str], None] | None = None,
    ) -> None:
        self._timeout_seconds, self._rank, self._world_size = timeout_seconds, rank, world_size
        self._dump, self._read_dumps, self._has_dumped = dump, read_dumps, False
        self._start_timeout_seconds = timeout_seconds if start_timeout_seconds is None else start_timeout_seconds
        self._is_started = False
        self._record, self._when_started, self._on_heartbeat = record, when_started, on_heartbeat
        self._last = (0, "starting")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def heartbeat(self, step: int, activity: str) -> None:
        """Heartbeat: report that this rank has reached optimizer step `step` and is about to do `activity`."""
        self._last = (step, activity)
        if self._on_heartbeat is not None:
            self._on_heartbeat(step, activity)

    def now(self, activity: str) -> None:
        """Heartbeat: report that this rank, still in the same optimizer step, is about to do `activity`."""
        self.heartbeat(self._last[0], activity)

    def started(self) -> None:
        """Report that one-time work such as compilation is done; from then on `timeout_seconds` applies. Idempotent."""
        if not self._is_started:
            self._is_started = True
            if self._when_started is not None:
                self._when_started()

    @property
    def limit_seconds(self) -> float:
        """The timeout that currently applies."""
        return self._timeout_seconds if self._is_started else self._start_timeout_seconds

    def alive(self) -> None:
        """Heartbeat: report that the current activity makes progress; does not call `on_heartbeat`."""
        step, activity = self._last
        self._last = (step, activity)

    @property
    def silent_ranks_message(self) -> str:
        """Message that names the silent ranks.

        It is empty if no rank is silent, or if this rank has no dumps to compare, as before half of the timeout.
        """
        return _describe_silent(self._silent(self._dumps()))

    def _dumps(self) -> Mapping[int, tuple[int, str]] | None:
        """Return the dumps of the waiting ranks.

        None if this rank has not waited for half of the timeout, is alone, or could not write its own dump.
        """
        return self._read_dumps() if self._read_dumps is not None and self._has_dumped else None

    def _silent(self, dumps: Mapping[int, tuple[int, str]] | None) -> list[int]:
        return [] if dumps is None else [rank for rank in range(self._world_size) if rank not in dumps]

    def __enter__(self) -> Self:
        self.heartbeat(0, "starting")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        tick = min(self._timeout_seconds / _TICKS, self._start_timeout_seconds / _TICKS, _LONGEST_TICK)
        seen = self._last
        waited = 0.0
        last_check = time.monotonic()
        while not self._over.wait(tick):
            now = time.monotonic()
            elapsed, last_check = now - last_check, now
            if self._last is not seen:
                seen, waited, self._has_dumped = self._last, 0.0, False
                continue
            # A check much later than scheduled means that the process was stopped, so at most two ticks count.
            limit = self.limit_seconds
            waited += min(elapsed, 2 * tick)
            if waited >= limit / 2 and not self._has_dumped and self._dump is not None and self._world_size > 1:
                self._has_dumped = True
                # Dump in a thread, because this process may be waiting for the file system of the dump.
                threading.Thread(target=self._dump, args=seen, daemon=True).start()
            if waited >= limit:
                self._end(waited, *seen)

    def _end(self, seconds: float, step: int, activity: str) -> None:
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(main)) if main is not None else ""
        lines = [self._verdict(seconds, step, activity, None)[1]]

        def record() -> None:
            rank, line = self._verdict(seconds, step, activity, self._dumps())
            lines.append(line)
            if self._record is not None:
                self._record(rank, line, stack)
            if self._dump is not None:
                self._dump(step, activity)

        recording = threading.Thread(target=record, daemon=True)
        recording.start()
        recording.join(_RECORDING_SECONDS)
        sys.stderr.write(f"{lines[-1]}\n")
        sys.stderr.flush()
        # Only `os._exit` ends a thread that is stuck inside a collective; no orderly cleanup is possible.
        os._exit(ExitCode.STALLED)

    def _verdict(
        self, seconds: float, step: int, activity: str, dumps: Mapping[int, tuple[int, str]] | None
    ) -> tuple[int, str]:
        """Return the rank at fault, and the message about the silent ranks or about this rank's lack of progress."""
        limit = self.limit_seconds
        name = "timeout_seconds" if limit == self._timeout_seconds else "start_timeout_seconds"
        setting = f"(distributed.{name}={limit:g}), at step {step}, {activity}"
        ending = f"ended with exit code {int(ExitCode.STALLED)}"
        if silent := self._silent(dumps):
            return silent[
                0
            ], f"{_describe_silent(silent)}; rank {self._rank} waited for {seconds:.0f} s {setting}: {ending}"
        other_ranks = {rank: at for rank, at in (dumps or {}).items() if at != (step, activity)}
        slowest = min(other_ranks, key=lambda rank: other_ranks[rank][0], default=self._rank)
        details = "".join(f"; rank {rank} is at step {at[0]}, {at[1]}" for rank, at in sorted(other_ranks.items())[:8])
        line = f"rank {self._rank} has made no progress for {seconds:.0f} s {setting}{details}: {ending}"
        return (slowest if slowest in other_ranks and other_ranks[slowest][0] < step else self._rank), line


def _describe_silent(silent: Sequence[int]) -> str:
    ranks = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))}"
    return f"{ranks} gave no sign of life (stopped, busy, or unreachable)" if silent else ""


def translate(
    error: BaseException, *, rank: int, step: int, activity: str, known_cause: str = ""
) -> CollectiveError | None:
    """Return a one-line `CollectiveError` if `error` comes from a failed collective; None for any other error.

    Args:
        error: exception raised during the step.
        rank: rank of this process.
        step: number of completed optimizer steps.
        activity: activity of the rank, as in `Watchdog.heartbeat`.
        known_cause: cause for the message, as in `Watchdog.silent_ranks_message`; if empty, derived from `error`.
    """
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    is_collective = isinstance(error, dist.DistError) or (
        isinstance(error, (RuntimeError, ConnectionError)) and any(part in str(error) for part in _COLLECTIVE_MESSAGES)
    )
    if not is_collective:
        return None
    late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
    cause = known_cause or (
        "another rank did not join in time" if late else "another rank has ended; see its error for the cause"
    )
    return CollectiveError(f"rank {rank}, step {step}, {activity}: {cause} ({text[:200]})")
