"""Worker that runs an environment in a separate process, which is killed after a timeout and restarted."""

if __name__ == "__main__":
    from foundry.core.safe_path import leave_current_folder

    leave_current_folder()  # before the imports below

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foundry.core import stop_signals
from foundry.core.errors import as_text, shortened, visible
from foundry.core.foreign import ForeignData
from foundry.core.safe_path import environment_of_module
from foundry.generation.scoring import Answer, Environment

_START_SECONDS = 600.0
"""Timeout for importing and building the environment; long enough for a busy machine."""
_POLL_SECONDS = 1.0
"""Seconds between two checks that the process is alive."""
_MAX_MESSAGE_LENGTH = 300
_MAX_REPLY_BYTES = 2**26
"""Maximum size of a reply: an environment that writes endlessly into the connection could exhaust all memory."""


class FaultError(RuntimeError):
    """An answer could not be scored.

    Attributes:
        kind: `raised`, `timed_out` or `died`.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Worker:
    """Proxy of an environment that runs in a separate process.

    Args:
        node: configuration of the environment, with `_target_`.
        timeout_seconds: maximum duration of one call of the environment's `score`.

    Raises:
        FaultError: if the environment cannot be built.
    """

    def __init__(self, node: Mapping[str, Any], timeout_seconds: float) -> None:
        self._node, self._timeout = dict(node), timeout_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._requests = 0
        self._start()

    def score(self, answers: Sequence[Answer]) -> list[dict[str, float | None]]:
        """Return the scores of each answer, from one call of the environment.

        Raises:
            FaultError: if the call raised, timed out, or its process died; a process that timed out or died is replaced
                for the next answers.
        """
        if self._process is None:
            self._start()
        slow = f"took longer than environment.timeout_seconds={self._timeout:g}"
        reply = self._send({"answers": [vars(answer) for answer in answers]}, self._timeout, slow)
        if "raised" in reply:
            raise FaultError("raised", reply["raised"])
        with ForeignData(self._protocol_error):
            return _check_scores(reply["scores"], len(answers))

    def close(self) -> None:
        """Kill the process and its child processes."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def _start(self) -> None:
        command = [sys.executable, "-P", "-m", __name__]
        with stop_signals.blocked_signals():
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                env=environment_of_module(),
            )
        python_path = os.environ.get("PYTHONPATH")
        first = {"path": sys.path, "PYTHONPATH": python_path, "node": self._node, "parent": os.getpid()}
        reply = self._send(first, _START_SECONDS, f"was not ready after {_START_SECONDS:g} seconds")
        if "raised" in reply:
            self.close()
            raise FaultError("raised", reply["raised"])

    def _send(self, request: Mapping[str, Any], seconds: float, slow: str) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            self._requests += 1
            numbered = {**request, "number": self._requests}
            process.stdin.write(json.dumps(numbered, default=str).encode() + b"\n")
            process.stdin.flush()
            line = self._read_line(time.monotonic() + seconds)
        except BrokenPipeError:
            line = b""
        except TimeoutError:
            self.close()
            raise FaultError("timed_out", slow) from None
        if len(line) > _MAX_REPLY_BYTES:
            raise self._protocol_error(f"more than {_MAX_REPLY_BYTES} bytes")
        if not line.endswith(b"\n"):
            raise FaultError("died", f"{self._describe_exit()} in the environment's process")
        with ForeignData(self._protocol_error):
            return _parse_reply(line, self._requests)

    def _protocol_error(self, reason: str) -> FaultError:
        """Kill the process, since replies after an invalid reply may be invalid too, and return the error to raise."""
        self.close()
        return FaultError("died", f"wrote into the connection of the environment's process ({reason})")

    def _describe_exit(self) -> str:
        """Kill a process that no longer replies, and return a description of how it ended."""
        assert self._process is not None
        try:
            code = self._process.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            return "the connection was closed"
        finally:
            self.close()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def _read_line(self, deadline: float) -> bytes:
        """Read a line from the process; the line is incomplete if the process has ended or the line is too long.

        Raises:
            TimeoutError: if there is no complete line before the deadline.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        line, stream = bytearray(), self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while not line.endswith(b"\n") and len(line) <= _MAX_REPLY_BYTES:
                remaining = deadline - time.monotonic()
                if selector.select(max(0.0, min(remaining, _POLL_SECONDS))):
                    part = os.read(stream, 2**16)
                    if not part:
                        break
                    line += part
                elif remaining <= 0:
                    raise TimeoutError
                elif self._process.poll() is not None:  # child processes of the worker may keep the pipe open
                    break
        return bytes(line)


def _parse_reply(line: bytes, number: int) -> dict[str, Any]:
    """Return the reply to the request with a number.

    Raises:
        ValueError: if the line is not that reply.
    """
    reply = json.loads(line)
    if not isinstance(reply, dict) or reply.get("number") != number:
        raise ValueError(f"{as_text(reply)} is not a reply to request {number}")
    return {**reply, "raised": visible(str(reply["raised"]))} if "raised" in reply else reply


def _serve() -> None:
    """Build the environment described in the first line, and score the answers in each further line.

    Runs in the worker.
    """
    stop_signals.outlive()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the environment's output goes to stderr
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the environment cannot read the requests
    first = json.loads(requests.readline())
    stop_signals.end_with_parent(first["parent"])
    _prefer_oom_kill()
    sys.path[:] = first["path"]
    if first["PYTHONPATH"] is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = first["PYTHONPATH"]
    pid = os.getpid()

    def reply(number: int, **content: Any) -> None:
        if os.getpid() != pid:  # a forked child of the environment returned here too
            os._exit(0)
        replies.write(json.dumps({"number": number, **content}) + "\n")
        replies.flush()

    try:
        from foundry.config.build import build, find_method_problem

        environment = build(first["node"])
        if problem := find_method_problem(environment, Environment):
            raise TypeError(f"{first['node']['_target_']} {problem}")
    except BaseException as error:  # including SystemExit and similar
        reply(first["number"], raised=_describe(error))
        return
    reply(first["number"], ready=True)
    for line in requests:
        request = json.loads(line)
        try:
            answers = [Answer(**answer) for answer in request["answers"]]
            reply(request["number"], scores=_check_scores(environment.score(answers), len(answers)))
        except BaseException as error:
            reply(request["number"], raised=_describe(error))


def _check_scores(scores: Any, count: int) -> list[dict[str, float | None]]:
    """Return the scores of `count` answers with names as strings and values as floats or None.

    Raises:
        TypeError: if `scores` is not a list of `count` mappings from names to numbers.
    """
    is_list = isinstance(scores, (list, tuple)) and len(scores) == count
    if not is_list or not all(isinstance(row, Mapping) for row in scores):
        expected = "a list of one mapping" if count == 1 else f"a list of {count} mappings"
        raise TypeError(f"score(answers) returned {as_text(scores)}, not {expected} from names to numbers")
    if invalid := [name for row in scores for name in row if not str(name).isprintable()]:
        raise TypeError(f"score(answers) returned the name {as_text(invalid[0])}, which cannot be printed")
    return [{str(name): _number(name, value) for name, value in row.items()} for row in scores]


def _number(name: object, value: Any) -> float | None:
    try:
        if isinstance(value, str):
            raise TypeError
        return None if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"score(answers) returned {as_text(value)} as {as_text(name)}, not a number") from None


def _prefer_oom_kill() -> None:
    """Make the kernel's OOM killer prefer this process to the training run."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _describe(error: BaseException) -> str:
    message = shortened(visible(str(error)), _MAX_MESSAGE_LENGTH)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


if __name__ == "__main__":
    _serve()
