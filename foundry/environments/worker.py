"""An environment in a process of its own, which is ended when it takes too long and started again."""

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from foundry.environments.protocol import Answer

_START_SECONDS = 600.0
"""To import what the environment needs, on a busy machine."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class FaultError(RuntimeError):
    """An answer could not be scored.

    Attributes:
        kind: `raised`, `timed_out` or `died`.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Worker:
    """Has a process score answers one by one.

    Args:
        node: configuration of the environment, with `_target_`.
        timeout_seconds: longest time to score one answer.

    Raises:
        FaultError: the environment cannot be built.
    """

    def __init__(self, node: Mapping[str, Any], timeout_seconds: float) -> None:
        self._node, self._timeout = dict(node), timeout_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def score(self, answer: Answer) -> Any:
        """What the environment answers, whatever that is.

        Raises:
            FaultError: it raised, took too long, or its process has died; the next answer is scored by a new one.
        """
        if self._process is None:
            self._start()
        request = {
            "text": answer.text,
            "prompt": answer.prompt,
            "columns": dict(answer.columns),
            "is_truncated": answer.is_truncated,
        }
        reply = self._ask(request, self._timeout)
        if "raised" in reply:
            raise FaultError("raised", reply["raised"])
        return reply["scores"]

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def _start(self) -> None:
        command = [sys.executable, "-m", __name__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        reply = self._ask({"path": sys.path, "node": self._node, "parent": os.getpid()}, _START_SECONDS)
        if "raised" in reply:
            self.close()
            raise FaultError("raised", reply["raised"])

    def _ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request, default=str).encode() + b"\n")
            process.stdin.flush()
            line = self._read_line(time.monotonic() + seconds)
        except BrokenPipeError:
            line = b""
        except TimeoutError:
            self.close()
            raise FaultError("timed_out", f"took longer than environment.timeout_seconds={seconds:g}") from None
        if not line.endswith(b"\n"):
            code = process.wait()
            self.close()
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise FaultError("died", f"{how} in the environment's process")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _read_line(self, deadline: float) -> bytes:
        """A line of the process, or what there is of it where the process has ended.

        Raises:
            TimeoutError: there is none by then.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        line, stream = b"", self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                part = os.read(stream, 2**16)
                if not part:
                    break
                line += part
        return line


def _serve() -> None:
    """In the process: build the environment that the first line names, and score an answer for each line after it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks ends this one
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the environment prints is for people
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    first = json.loads(requests.readline())
    _end_with(first["parent"])
    sys.path[:] = first["path"]

    def reply(content: Mapping[str, Any]) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    try:
        from foundry.config.build import build

        environment = build(first["node"])
        if not callable(getattr(environment, "score", None)):
            raise TypeError(f"{first['node']['_target_']} has no method score(answers)")
    except Exception as error:
        reply({"raised": _described(error)})
        return
    reply({"ready": True})
    for line in requests:
        try:
            reply({"scores": _checked(environment.score([Answer(**json.loads(line))]))})
        except Exception as error:
            reply({"raised": _described(error)})


def _checked(scores: Any) -> dict[str, float | None]:
    """The scores of one answer.

    Raises:
        TypeError: they are none.
    """
    if not isinstance(scores, (list, tuple)) or len(scores) != 1 or not isinstance(scores[0], Mapping):
        raise TypeError(f"score(answers) returned {scores!r} for one answer, not a list of one mapping")
    return {str(name): None if value is None else float(value) for name, value in scores[0].items()}


def _end_with(parent: int) -> None:
    """End this process when the one that started it does, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def _described(error: BaseException) -> str:
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


if __name__ == "__main__":
    _serve()
