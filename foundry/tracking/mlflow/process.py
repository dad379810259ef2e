"""MLflow store in a separate process.

MLflow's import alone takes longer than torch's and holds the interpreter lock: in the training process, it would slow
down the first steps. The separate process may also be killed, or hang, without harm to the run. Both sides exchange
lines of JSON, one per request and one per reply. The process ends when its standard input closes, i.e. with the
training process. It does not receive signals meant for the training process.
"""

if __name__ == "__main__":
    from foundry.core.safe_path import leave_current_folder

    leave_current_folder()  # before the imports below

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from foundry.core import stop_signals
from foundry.core.safe_path import environment_of_module
from foundry.run_dir.redact import known_secrets, one_line, remember
from foundry.tracking.mlflow.destination import SHORT_WAITS, Destination
from foundry.tracking.mlflow.store import MlflowStore, Operation
from foundry.tracking.mlflow.system_metrics import SystemMetrics

_log = logging.getLogger(__name__)
_SECONDS_TO_DIE = 5.0
_idle: dict[int, subprocess.Popen[bytes]] = {}
"""Idle store process, keyed by the id of the process that started it; reused by the next job of a sweep."""


class ProcessEndedError(RuntimeError):
    """Raised if the store process was killed or crashed."""


class StoreError(Exception):
    """Exception that MLflow raised in the store process.

    Attributes:
        kind: name of the exception's type.
        error_code: error code of MLflow's own exceptions; None for other types.
    """

    def __init__(self, kind: str, message: str, error_code: str | None) -> None:
        super().__init__(message)
        self.kind, self.error_code = kind, error_code


class RemoteStore:
    """Proxy of an `MlflowStore` in a separate process; a request starts the process if it is not running.

    Args:
        run_dir: folder of the artifacts and of `mlflow.json`.
        destination: the run, created if it does not exist yet.
        system_metrics: measure system metrics in the store process until the run ends.
    """

    def __init__(self, run_dir: Path, destination: Destination, *, system_metrics: bool = False) -> None:
        # Read environment and directory now, since both may change before the process is started.
        self._open_request = {
            "do": "open",
            "environment": {**SHORT_WAITS, **os.environ},
            "directory": str(Path.cwd()),
            "run_dir": str(run_dir.absolute()),
            "destination": asdict(destination),
            "secrets": known_secrets(),
            "system_metrics": system_metrics,
        }
        self._process: subprocess.Popen[bytes] | None = None

    def connect(self) -> None:
        """Start the store process and let it find or create the run, if this has not been done.

        Raises:
            StoreError: if MLflow raises an exception.
            ProcessEndedError: if the store process has ended.
        """
        if self._process is None:
            self._process = _take_idle() or _start()
            self._ask(self._open_request)

    def apply(self, operations: Sequence[Operation]) -> None:
        """Execute one operation, or several metrics operations in one batch.

        Raises the same exceptions as `connect`.
        """
        self.connect()
        self._ask({"do": "apply", "operations": list(operations)})

    def close(self, *, is_responsive: bool) -> None:
        """Keep the store process for the next run in this process if it responds and no other is kept; else kill it."""
        process, self._process = self._process, None
        if process is None:
            return
        if is_responsive and process.poll() is None and os.getpid() not in _idle:
            _idle[os.getpid()] = process
        else:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # a disk that does not respond may block the process
                process.wait(_SECONDS_TO_DIE)

    def _ask(self, request: Mapping[str, Any]) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        line = b""
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request, default=str).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if not line.endswith(b"\n"):
            self.close(is_responsive=False)
            raise ProcessEndedError(f"the sending process ended with exit code {process.returncode}")
        reply = json.loads(line)
        for message in reply["log"]:
            _log.warning("%s", one_line(message))
        if error := reply["error"]:
            if request["do"] == "open":
                self.close(is_responsive=True)  # the next attempt sends the request again
            raise StoreError(*error)


def _start() -> subprocess.Popen[bytes]:
    """Start a process that waits for requests. Its command line contains nothing about the run."""
    with stop_signals.blocked_signals():
        return subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment_of_module(),
        )


def _take_idle() -> subprocess.Popen[bytes] | None:
    process = _idle.pop(os.getpid(), None)
    return process if process is not None and process.poll() is None else None


class _Messages(logging.Handler):
    """Log handler that collects warnings for the next reply."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Execute requests until the input ends."""
    store: MlflowStore | None = None
    monitor: SystemMetrics | None = None
    messages = _Messages()
    logging.getLogger("foundry").addHandler(messages)
    for line in requests:
        request = json.loads(line)
        error = None
        messages.texts.clear()
        try:
            if request["do"] == "open":
                store = _open(request)
                _, run_id = store.connect()
                monitor = SystemMetrics(request["destination"]["uri"], run_id) if request["system_metrics"] else None
            else:
                assert store is not None
                if monitor is not None:
                    monitor.maintain(ends=request["operations"][0]["op"] == "end")
                store.apply(request["operations"])
        except Exception as exception:
            error = (type(exception).__name__, str(exception), getattr(exception, "error_code", None))
        try:
            replies.write(json.dumps({"error": error, "log": messages.texts}, default=str).encode() + b"\n")
            replies.flush()
        except BrokenPipeError:
            return


def _open(request: Mapping[str, Any]) -> MlflowStore:
    """Set environment, current directory and secrets to those in a request, and return the store for its run."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    for secret, reference in request["secrets"].items():
        remember(secret, reference)
    return MlflowStore(Path(request["run_dir"]), Destination(**request["destination"]), trust=True)


def main() -> None:
    """Serve standard input. Output printed by libraries is discarded."""
    stop_signals.outlive()
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()
