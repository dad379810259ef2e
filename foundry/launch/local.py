"""Several processes on this machine."""

import atexit
import json
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from foundry.config.environment import STORE, default_variables
from foundry.core.errors import ConfigError, Violation, format_reason
from foundry.core.safe_path import VARIABLE
from foundry.core.stop_signals import STOP_SIGNALS, end_with_parent
from foundry.core.stopped import Stopped
from foundry.run_dir.ends import NOTES, leave_note

_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 5.0  # for the others to fail because one has
_LAST_PATIENCE_SECONDS = 15.0  # for them to obey SIGTERM; one that is stopped obeys SIGKILL only
START = multiprocessing.get_context("spawn")  # what CUDA holds does not survive a fork
_PROCESS = ".process"
_ANSWER = "answer"
# A rank that fails because another died says one of these; the other's error is the one to show.
_CONSEQUENCES = ("CollectiveError", "DistBackendError", "DistNetworkError", "DistStoreError")
_CONSEQUENCE_TEXTS = ("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe")


class WorkerFailed(RuntimeError):
    """A process ended with an error of its own.

    Attributes:
        rank: which one.
        reason: the last line of its error.
        trace: its whole traceback; empty where it was killed.
        exit_code: what the whole run should end with.
        kind: the class of its error; empty where it was killed.
        was_stopped: whether a signal had asked all of them to stop before.
    """

    def __init__(self, rank: int, reason: str, trace: str = "", exit_code: int = 1, kind: str = "") -> None:
        self.rank = rank
        self.kind = kind
        self.was_stopped = False
        self.reason = reason
        self.trace = trace
        self.exit_code = exit_code
        super().__init__(reason if reason.startswith("rank") else f"rank {rank} failed: {reason}")


def format_trace(error: BaseException) -> str:
    """What to show of a failed run: the traceback, of the rank that failed where there are several."""
    if isinstance(error, WorkerFailed):
        return f"{error}\n{error.trace}"
    return "".join(traceback.format_exception(error))


def run_local(nproc: int, function: Callable[..., Any], *args: Any) -> Any:
    """Run `function(*args)` in `nproc` processes with torchrun's variables set, and return what rank 0 returns.

    They meet in a file of a folder that only this user can enter, so that none of them listens for that.

    A signal to this process reaches each of them once, as the same signal; Ctrl-C in a terminal too, because they have
    sessions of their own, out of its reach. They have all the time they need to save, as one process has: whoever sends
    SIGTERM sets a limit, and the watchdog ends one that is stuck. A second Ctrl-C kills them at once, and so does any
    signal before all of them are there.

    Args:
        nproc: processes to start, at least 1.
        function: importable from a module, as are its arguments' types; each process starts from scratch (spawn).
        args: the same for every process.

    Raises:
        Stopped: the processes saved and ended because of a signal; rank 0's.
        ConfigError: a process raised one.
        WorkerFailed: a process failed otherwise, or was killed.
        KeyboardInterrupt: Ctrl-C ended them before there was anything to save, or a second one did.
        SystemExit: another signal did; its code is 128 + its number.
    """
    # Started here, because starting it lets SIGINT through.
    with default_variables({VARIABLE: "1"}):
        resource_tracker.ensure_running()
    with (
        noted_signals() as noted,
        tempfile.TemporaryDirectory(prefix="foundry-") as name,  # its mode is 0700
        # The processes inherit it, and share the cores.
        default_variables({"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // nproc))}),
    ):
        folder, ranks = Path(name), list[BaseProcess]()
        try:
            _start(ranks, nproc, (function, args, folder))
            ends, killed = _wait(ranks, noted, folder)
        finally:
            for rank in ranks:
                if rank.is_alive():
                    rank.kill()
                rank.join()
        if any(ends.values()):
            if killed or _is_due_to_signal(noted, folder, ends):
                raise ended_by(noted[0])
            cause = _first_cause(folder, ends)
            if isinstance(cause, WorkerFailed):
                cause.was_stopped = bool(noted)
            raise cause
        answer = pickle.loads((folder / _ANSWER).read_bytes())  # a process of this user's wrote it
    if isinstance(answer, Stopped):
        raise answer
    return answer


def _start(ranks: list[BaseProcess], nproc: int, work: tuple[Any, ...]) -> None:
    """Start the processes, which hold SIGINT back, as this one does meanwhile."""
    with interrupts_held(), default_variables({VARIABLE: "1"}):
        for rank in range(nproc):
            process = START.Process(target=_work, args=(rank, nproc, *work))
            process.start()
            ranks.append(process)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back, here and in processes that are started meanwhile, until they say otherwise."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_session() -> None:
    """In a process that was started with SIGINT held back: leave the terminal's reach, and drop one that came before.

    The process that started this one has it too, and says what it means.
    """
    os.setsid()
    signal.sigtimedwait({signal.SIGINT}, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _work(rank: int, nproc: int, function: Callable[..., Any], args: tuple[Any, ...], folder: Path) -> None:
    """In the process: run, and leave in `folder` the answer of rank 0, or a note where that fails.

    A Stopped is an answer too.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), NOTES: str(folder), STORE: str(folder / "store")}
    os.environ |= {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc)}
    codes: list[int] = []
    atexit.register(_end_without_destructors, codes)  # called after all that are registered later
    try:
        _join_session(folder)
        try:
            answer = function(*args)
        except Stopped as stopped:
            answer = stopped
        if rank == 0:
            (folder / _ANSWER).write_bytes(pickle.dumps(answer))
    except KeyboardInterrupt:
        codes.append(128 + signal.SIGINT)
        sys.exit(codes[0])
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (0, None):
            raise
        _note(error)
        codes.append(1)
        sys.exit(codes[0])  # multiprocessing would print the traceback; that is for the process that started this one


def _end_without_destructors(codes: list[int]) -> None:
    """In the process, if it has failed: end it before the destructors of its libraries run.

    A failed rank is still in its process group, whose threads C++ would end with an error message of its own.
    """
    if codes:
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # it is missing, its reader is gone, or it is closed
                stream.flush()
        os._exit(codes[0])


def _join_session(folder: Path) -> None:
    """In the process: take signals from the parent only, and tell it so by a file named after this process's number.

    SIGINT is held back until here, so that Ctrl-C during imports prints no traceback.
    """
    end_with_parent()
    begin_session()
    (folder / f"{os.getpid()}{_PROCESS}").touch()


@contextmanager
def noted_signals() -> Iterator[list[signal.Signals]]:
    """The signals that come meanwhile, in order; one that is ignored, as under nohup, stays so."""
    noted: list[signal.Signals] = []

    def note(signum: int, frame: FrameType | None) -> None:
        noted.append(signal.Signals(signum))

    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    for signum, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(signum, note)
    try:
        yield noted
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _wait(ranks: list[BaseProcess], noted: list[signal.Signals], folder: Path) -> tuple[dict[int, int], bool]:
    """Wait for all to end, and send each signal that comes to every process.

    Once one has failed, the others have time to fail in their turn, for that may tell the cause; then they are ended.

    Returns:
        The exit codes, by rank, of those that ended by themselves, the first first; whether a signal had all killed.
    """
    ends = dict[int, int]()
    failed_at = math.inf
    is_ending = False
    num_passed = 0
    killing = False
    while True:
        alive = []
        for number, rank in enumerate(ranks):
            if rank.exitcode is None:
                alive.append(rank)
            elif not is_ending:
                ends.setdefault(number, rank.exitcode)
        if not alive:
            return ends, killing
        if any(ends.values()):
            failed_at = min(failed_at, time.monotonic())
        new = noted[num_passed:]
        num_passed += len(new)
        num_ready = len(list(folder.glob(f"*{_PROCESS}")))
        killing = killing or noted.count(signal.SIGINT) > 1 or (bool(new) and num_ready < len(ranks))
        late = time.monotonic() - failed_at
        if late > _PATIENCE_SECONDS and not is_ending:
            new, is_ending = [*new, signal.SIGTERM], True
        for rank in alive:
            if killing or late > _LAST_PATIENCE_SECONDS:
                rank.kill()
            elif rank.pid is not None:
                for signum in new:
                    os.kill(rank.pid, signum)  # nobody has waited for it yet, so the number is still its own
        connection.wait([rank.sentinel for rank in alive], _POLL_SECONDS)


def _is_due_to_signal(noted: list[signal.Signals], folder: Path, ends: dict[int, int]) -> bool:
    """Whether the processes ended because of a signal that found nothing to save, and not of an error of their own."""
    expected = {code for signum in noted for code in (-signum, 128 + signum)}
    silent_ones_too = all(code in expected for code in _silent(folder, ends).values())
    return bool(noted) and silent_ones_too and all(map(_is_consequence, _notes(folder)))


def ended_by(signum: signal.Signals) -> BaseException:
    """What a process raises that ends because of a signal: the shell's exit code for it comes of that."""
    return KeyboardInterrupt() if signum is signal.SIGINT else SystemExit(128 + signum)


def _note(error: BaseException) -> None:
    """In the process: tell the one that started it what went wrong."""
    violations = error.violations if isinstance(error, ConfigError) else ()
    leave_note(
        kind=type(error).__name__,
        reason=format_reason(error),
        trace=format_trace(error),
        violations=[(violation.key, violation.message) for violation in violations],
    )


def _first_cause(folder: Path, ends: dict[int, int]) -> Exception:
    """The error to show: a config error, else the earliest that is not the consequence of another rank's end."""
    notes = _notes(folder)
    for note in notes:
        if note["violations"]:
            return ConfigError([Violation(key, message) for key, message in note["violations"]])
    causes = [note for note in notes if not _is_consequence(note)]
    for rank, code in () if causes else _silent(folder, ends).items():
        return WorkerFailed(rank, how_it_ended(code))
    first = min(causes or notes, key=lambda note: note["time"])
    return WorkerFailed(first["rank"], first["reason"], first["trace"], first["exit_code"], first["kind"])


def _notes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("rank*.json")]


def _silent(folder: Path, ends: dict[int, int]) -> dict[int, int]:
    """The exit codes, by rank, of processes that failed and left no note."""
    return {rank: code for rank, code in ends.items() if code and not (folder / f"rank{rank}.json").exists()}


def is_consequence(kind: str, reason: str) -> bool:
    """Whether a rank's error, of class `kind`, only says that another rank is gone."""
    return kind in _CONSEQUENCES or any(text in reason for text in _CONSEQUENCE_TEXTS)


def _is_consequence(note: dict[str, Any]) -> bool:
    return is_consequence(note["kind"], note["reason"])


def how_it_ended(exitcode: int) -> str:
    """What an exit code, negative for a signal, says of a process that recorded no reason."""
    if exitcode < 0:
        name = signal.Signals(-exitcode).name
        return f"killed by {name}" + (": out of memory?" if name == "SIGKILL" else "")
    return f"ended with exit code {exitcode}"
