"""Background delivery of operations to a store that may be slow or unreachable. The caller waits only in `close`."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from foundry.run_dir import redact
from foundry.run_dir.files import open_regular
from foundry.run_dir.strict_json import decode, encode
from foundry.tracking.mlflow.process import RemoteStore
from foundry.tracking.mlflow.store import METRICS_PER_REQUEST, OPERATIONS, Operation, is_refusal

_log = logging.getLogger(__name__)
_SECONDS_BETWEEN_BATCHES = 1.0
_LONGEST_BACK_OFF_SECONDS = 30.0
_LONGEST_LINE = 2**24  # bytes
_KEPT_IN_MEMORY = 10_000  # operations; after a failed request, a longer backlog moves to the pending file
_MOST_IN_MEMORY = 4 * _KEPT_IN_MEMORY  # hard limit, since nothing can be moved while the thread waits for a reply


class Store(Protocol):
    """Target of operations; raises MLflow's exceptions."""

    def connect(self) -> object:
        """Find or create the run. Repeated calls are free."""
        ...

    def apply(self, operations: Sequence[Operation]) -> None:
        """Execute one operation, or several metrics operations in one batch."""
        ...


class Delivery:
    """Thread that sends operations in order, and keeps undelivered ones on disk.

    Args:
        store: target of the operations.
        pending_file: file of undelivered operations, one per line; sent first when the store responds.
        prepare: called in the thread; returns the first operations to send, which take long to create.
        finish_seconds: timeout of `close()`.
        send_hint: hint logged if operations remain undelivered.
    """

    def __init__(
        self,
        *,
        store: RemoteStore,
        pending_file: Path,
        prepare: Callable[[], Iterable[Operation]],
        finish_seconds: float,
        send_hint: str,
    ) -> None:
        self._store = store
        self._pending_file = pending_file
        self._prepare = prepare
        self._finish_seconds = finish_seconds
        self._send_hint = send_hint
        self._backlog: deque[Operation] = deque()
        self._lock = threading.Lock()  # guards the head of the backlog; never held during a request
        self._closing = threading.Event()
        self._is_abandoned = False
        self._failures = 0
        self._num_lost = 0
        self._thread = threading.Thread(target=self._run, name="mlflow", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, operation: Operation) -> None:
        """Queue an operation. Takes microseconds, regardless of the store."""
        self._backlog.append(operation)
        if len(self._backlog) > _MOST_IN_MEMORY:
            with self._lock:
                self._backlog.popleft()
                self._num_lost += 1

    def close(self) -> None:
        """Wait at most `finish_seconds` for the delivery of the remaining operations.

        Write undelivered operations to the pending file, with a warning.
        """
        self._closing.set()
        self._thread.join(self._finish_seconds)
        with self._lock:
            self._is_abandoned = True
            self._move_to_disk()
        self._store.close(is_responsive=not self._thread.is_alive())
        if self._num_lost:
            _log.warning("MLflow: %d records were lost: the server was too slow for too long", self._num_lost)
        if self._pending_file.exists():
            count = sum(1 for _ in read_pending(self._pending_file))
            _log.warning(
                "MLflow: %d records were not delivered and are kept in %s; %s",
                count,
                self._pending_file,
                self._send_hint,
            )

    def _run(self) -> None:
        operations = list(self._prepare())
        with self._lock:
            self._backlog.extendleft(reversed(operations))
            if self._is_abandoned:
                self._move_to_disk()
        while not self._is_abandoned:
            closing = self._closing.is_set()
            try:
                while self._deliver_some():
                    self._note_success()
                if closing:
                    return
            except Exception as error:
                self._note_failure(error)
                if closing and self._failures > 1:
                    return
                time.sleep(0.1)
            self._closing.wait(min(2.0**self._failures, _LONGEST_BACK_OFF_SECONDS) * _SECONDS_BETWEEN_BATCHES)

    def _deliver_some(self) -> bool:
        """Send the pending file, or one batch. Return False if there is nothing to send, or after `close`."""
        if self._pending_file.exists():
            send_file(self._store, self._pending_file)
            with self._lock:
                if not self._is_abandoned:  # otherwise `close()` may have appended operations to the file
                    self._pending_file.unlink()
            return not self._is_abandoned
        with self._lock:
            batch = self._next_batch()
        if not batch:
            return False
        self._store.connect()
        _apply(self._store, batch)
        with self._lock:
            for operation in batch:
                if self._backlog and self._backlog[0] is operation:
                    self._backlog.popleft()
        return not self._is_abandoned

    def _next_batch(self) -> list[Operation]:
        """Return the next operation; for metrics, as many operations as fit into one request."""
        if self._is_abandoned or not self._backlog:
            return []
        batch = [self._backlog[0]]
        if batch[0]["op"] == "metrics":
            room = METRICS_PER_REQUEST - len(batch[0]["values"])
            for operation in list(self._backlog)[1:METRICS_PER_REQUEST]:
                room -= len(operation.get("values", ()))
                if operation["op"] != "metrics" or room < 0:
                    break
                batch.append(operation)
        return batch

    def _note_success(self) -> None:
        if self._failures:
            _log.info("MLflow responds again; pending records are being sent")
        self._failures = 0

    def _note_failure(self, error: Exception) -> None:
        if self._is_abandoned:  # `close()` has given up and killed the store process
            return
        self._failures += 1
        if self._failures == 1:
            _log.warning("MLflow cannot be reached, the run continues and will try again: %s", one_line(error))
        with self._lock:
            if len(self._backlog) > _KEPT_IN_MEMORY and not self._is_abandoned:
                self._move_to_disk()

    def _move_to_disk(self) -> None:
        """Append the backlog to the pending file. The caller holds the lock."""
        if self._backlog:
            write_pending(self._pending_file, self._backlog)
            self._backlog.clear()


def send_file(store: Store, pending_file: Path) -> int:
    """Send every operation of a pending file, and keep the file.

    Returns:
        The number of operations sent.

    Raises:
        Exception: any exception of the store.
    """
    store.connect()
    count = 0
    batch: list[Operation] = []
    for operation in read_pending(pending_file):
        if batch and (operation["op"] != "metrics" or batch[0]["op"] != "metrics" or len(batch) >= METRICS_PER_REQUEST):
            _apply(store, batch)
            batch = []
        batch.append(operation)
        count += 1
    if batch:
        _apply(store, batch)
    return count


def _apply(store: Store, batch: list[Operation]) -> None:
    """Execute operations. An operation that the store refuses is logged and skipped."""
    try:
        store.apply(batch)
    except Exception as error:
        if not is_refusal(error):
            raise
        if len(batch) > 1:  # retry the operations one by one, since only one may be invalid
            for operation in batch:
                _apply(store, [operation])
        else:
            _log.warning("MLflow rejects %s: %s", batch[0]["op"], one_line(error))


def write_pending(path: Path, operations: Iterable[Operation]) -> None:
    """Append operations to a file, one per line."""
    with open_regular(path, "a") as file:
        file.writelines(encode(operation) + "\n" for operation in operations)


def read_pending(path: Path) -> Iterator[Operation]:
    """Yield the operations of a pending file, without an incomplete last line.

    Raises:
        ValueError: if a line is not an operation.
        OSError: if the path is not a regular file, or cannot be read.
    """
    with open_regular(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), start=1):
            if line.endswith(b"\n"):
                yield _operation(line, f"{path}:{number}")
            elif len(line) == _LONGEST_LINE:
                raise ValueError(f"{path}:{number} is longer than any record")


def _operation(line: bytes, location: str) -> Operation:
    """Decode and validate the operation in a line.

    Raises:
        ValueError: if the line is not an operation that foundry writes.
    """
    try:
        operation = decode(line.decode())
        types = OPERATIONS[operation["op"]]
        is_valid = all(isinstance(operation[name], kind) for name, kind in types.items())
        values = operation.get("values", {}).values()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(f"{location} is not a record of foundry: {line[:80]!r}") from None
    value_type = (int, float) if operation["op"] == "metrics" else str
    if not is_valid or not all(isinstance(value, value_type) for value in values):
        raise ValueError(f"{location} is not a record of foundry: {line[:80]!r}")
    return dict(operation)


def one_line(error: Exception) -> str:
    """Format an exception as one line, without credentials."""
    return f"{getattr(error, 'kind', type(error).__name__)}: {redact.one_line(str(error))[:300]}"
