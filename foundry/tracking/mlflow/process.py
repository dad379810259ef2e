"""A store in MLflow that is asked from a process of its own.

MLflow's import alone takes longer than torch's, and holds the interpreter: in the process that trains it would take
its time from the first steps. Here it can also be killed, or hang, without harm to the run. Both sides speak JSON, a
line a request and a line a reply. The process ends with its standard input, so with the one that trains; signals that
are meant for that one it does not see.
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
from foundry.run_dir.redact import known, one_line, remember
from foundry.tracking.mlflow.destination import SHORT_WAITS, Destination
from foundry.tracking.mlflow.store import MlflowStore, Operation
from foundry.tracking.mlflow.system_metrics import SystemMetrics

_log = logging.getLogger(__name__)
_SECONDS_TO_DIE = 5.0
_idle: dict[int, subprocess.Popen[bytes]] = {}
"""By the process that started it, one whose run has ended: a sweep's next job in that process needs no other."""


class ProcessEndedError(RuntimeError):
    """The process that speaks to MLflow was killed, or died."""


class StoreError(Exception):
    """What MLflow raised in its process.

    Attributes:
        kind: name of the exception's type.
        error_code: as MLflow's own exceptions have it; None for others.
    """

    def __init__(self, kind: str, message: str, error_code: str | None) -> None:
        super().__init__(message)
        self.kind, self.error_code = kind, error_code


class RemoteStore:
    """An `MlflowStore` in a process of its own, which is started by the first request, and anew after its death.

    Args:
        run_dir: where artifacts lie and `mlflow.json` is kept.
        destination: the run, made when it does not exist yet.
        system_metrics: measure this machine, too, from there, until the run ends.
    """

    def __init__(self, run_dir: Path, destination: Destination, *, system_metrics: bool = False) -> None:
        # Read now: both may be others when the process is started.
        self._opening = {
            "do": "open",
            "environment": {**SHORT_WAITS, **os.environ},
            "directory": str(Path.cwd()),
            "run_dir": str(run_dir.absolute()),
            "destination": asdict(destination),
            "secrets": known(),
            "system_metrics": system_metrics,
        }
        self._process: subprocess.Popen[bytes] | None = None

    def connect(self) -> None:
        """Find or make the run.

        Raises:
            StoreError: what MLflow raises.
            ProcessEndedError: the process has ended meanwhile.
        """
        if self._process is None:
            self._process = _take_idle() or _start()
            self._ask(self._opening)

    def apply(self, operations: Sequence[Operation]) -> None:
        """Carry out one operation, or several of metrics together; raises as `connect`."""
        self.connect()
        self._ask({"do": "apply", "operations": list(operations)})

    def close(self, *, answers: bool) -> None:
        """Leave the process to this process's next run, or end it where it owes an answer."""
        process, self._process = self._process, None
        if process is None:
            return
        if answers and process.poll() is None and os.getpid() not in _idle:
            _idle[os.getpid()] = process
        else:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # it waits for a disk that does not answer
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
            self.close(answers=False)
            raise ProcessEndedError(f"the process that sends ended with exit code {process.returncode}")
        reply = json.loads(line)
        for message in reply["log"]:
            _log.warning("%s", one_line(message))
        if error := reply["error"]:
            if request["do"] == "open":
                self.close(answers=True)  # to be opened again by the next attempt
            raise StoreError(*error)


def _start() -> subprocess.Popen[bytes]:
    """A process that waits for requests; nothing of the run is on its command line."""
    with stop_signals.held_back():
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
    """Keeps warnings for the next reply."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Carry out requests until there are no more."""
    store: MlflowStore | None = None
    machine: SystemMetrics | None = None
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
                machine = SystemMetrics(request["destination"]["uri"], run_id) if request["system_metrics"] else None
            else:
                assert store is not None
                if machine is not None:
                    machine.keep_on(ends=request["operations"][0]["op"] == "end")
                store.apply(request["operations"])
        except Exception as raised:
            error = (type(raised).__name__, str(raised), getattr(raised, "error_code", None))
        try:
            replies.write(json.dumps({"error": error, "log": messages.texts}, default=str).encode() + b"\n")
            replies.flush()
        except BrokenPipeError:
            return


def _open(request: Mapping[str, Any]) -> MlflowStore:
    """The store of a run, with what its process has around it."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    for secret, reference in request["secrets"].items():
        remember(secret, reference)
    return MlflowStore(Path(request["run_dir"]), Destination(**request["destination"]), trust=True)


def main() -> None:
    """Serve standard input; what libraries print goes nowhere."""
    stop_signals.outlive()
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()
