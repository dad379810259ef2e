"""Function calls in a separate process with limits of processor time and memory.

The kernel enforces both limits, even within one long operation of the interpreter, such as `'a' * 10**10` or `9**9**9`.
The process is a fork, so it starts in milliseconds with all modules imported. It exits after 10 seconds without a call.
"""

import contextlib
import gc
import os
import pickle
import resource
import signal
import warnings
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from foundry.core import stop_signals

_IDLE_SECONDS = 10.0
"""Idle time after which the process exits; the next call starts another."""


_is_limited = False


class LimitExceededError(ValueError):
    """Raised if a call exceeds the limit of processor time or of memory."""


class LimitedProcess:
    """Calls a function in a separate process.

    Args:
        function: function with picklable arguments and result. It sees the caller's variables as they are at the fork:
            at the first call, and at the first call after the separate process has exited. Its standard output and
            standard error are discarded, and its standard input is empty.
        cpu_seconds: limit of processor time per call.
        memory_bytes: limit of additional memory that the process can allocate.
    """

    def __init__(self, function: Callable[..., Any], *, cpu_seconds: float, memory_bytes: int) -> None:
        self._function, self._cpu_seconds, self._memory_bytes = function, cpu_seconds, memory_bytes
        self._owner = self._pid = 0
        self._connection: Connection | None = None

    def call(self, *args: Any, **options: Any) -> Any:
        """Call the function, and return its result or raise its exception.

        Raises:
            LimitExceededError: the call exceeded a limit, or ended its process.
        """
        request = pickle.dumps((args, options))
        reply = self._send(request)
        if reply is None:  # the process exited because it was idle
            reply = self._send(request)
        if reply is None:
            raise LimitExceededError("ends its process")
        succeeded, value = pickle.loads(reply)  # safe: the reply was pickled by a fork of this process
        if succeeded:
            return value
        if isinstance(value, MemoryError):
            raise LimitExceededError(f"needs more than {self._memory_bytes >> 20} MiB of memory")
        raise value

    def close(self) -> None:
        """Kill the process, if it runs."""
        if self._connection is not None:
            self._connection.close()
        if self._owner == os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._wait()
        self._connection, self._owner = None, 0

    def _send(self, request: bytes) -> bytes | None:
        """Return the reply, or None if the process exited, without being killed, before it replied.

        Raises:
            LimitExceededError: the process was killed.
        """
        if self._connection is None or self._owner != os.getpid():
            self._start()
        assert self._connection is not None
        try:
            self._connection.send_bytes(request)
            return self._connection.recv_bytes()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            status = self._wait()
            self._connection.close()
            self._connection, self._owner = None, 0
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
                raise LimitExceededError(f"takes more than {self._cpu_seconds:g} s of processor time") from None
            if os.WIFSIGNALED(status):
                name = signal.Signals(os.WTERMSIG(status)).name
                raise LimitExceededError(f"ends its process with {name}") from None
            return None
        except BaseException:  # such as Ctrl-C; without close(), the next call would receive the reply to this one
            self.close()
            raise

    def _start(self) -> None:
        connection, child_connection = Pipe()
        with stop_signals.blocked_signals(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads; the fork uses none
            pid = os.fork()
            if pid == 0:
                try:
                    self._serve(child_connection)
                finally:
                    os._exit(1)
        child_connection.close()
        self._connection, self._owner, self._pid = connection, os.getpid(), pid

    def _wait(self) -> int:
        """Return the exit status of the process, or 0 if other code of this program has already collected it."""
        try:
            return os.waitpid(self._pid, 0)[1]
        except ChildProcessError:
            return 0

    def _serve(self, calls: Connection) -> NoReturn:
        """Serve calls; this runs in the separate process."""
        global _is_limited
        _is_limited = True
        stop_signals.outlive()
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        _close_other_files(calls.fileno())
        gc.freeze()  # garbage collection would copy memory shared with the training process
        _limit_memory(self._memory_bytes)
        while calls.poll(_IDLE_SECONDS):
            try:
                request = calls.recv_bytes()
            except EOFError:
                break
            renew_limit(self._cpu_seconds)
            try:
                args, options = pickle.loads(request)
                reply = pickle.dumps((True, self._function(*args, **options)))
            except MemoryError:
                reply = pickle.dumps((False, MemoryError()))
            except BaseException as error:
                reply = pickle.dumps((False, error))
            renew_limit(0)
            calls.send_bytes(reply)
        os._exit(0)


def is_limited() -> bool:
    """Return whether this process was started by a `LimitedProcess`."""
    return _is_limited


def renew_limit(cpu_seconds: float) -> None:
    """Limit the current call to `cpu_seconds` of processor time from now on; 0 disables the limit."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)


def _close_other_files(descriptor: int) -> None:
    """Close all other file descriptors, and redirect the standard streams to the null device."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _limit_memory(num_bytes: int) -> None:
    """Limit the additional memory of this process, and make it the first that the kernel's OOM killer ends."""
    with contextlib.suppress(OSError):  # no /proc on this system
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = pages * resource.getpagesize() + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
