"""Several processes on this machine, started by torch elastic."""

import ctypes
import itertools
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any

from foundry.config.errors import ConfigError, Violation
from foundry.config.stopped import Stopped
from foundry.launch.status import last_line

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_POLL_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PROCESS = ".process"
# A rank that fails because another died says one of these; the other's error is the one to show.
_CONSEQUENCES = ("CollectiveError", "DistBackendError", "DistNetworkError", "DistStoreError")
_CONSEQUENCE_TEXTS = ("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe")


class WorkerFailed(RuntimeError):
    """A process ended with an error of its own.

    Attributes:
        rank: which one.
        reason: the last line of its error.
        trace: its whole traceback; empty where it was killed.
    """

    def __init__(self, rank: int, reason: str, trace: str = "") -> None:
        self.rank, self.reason, self.trace = rank, reason, trace
        super().__init__(f"rank {rank} failed: {reason}")


def run_local(nproc: int, function: Callable[..., Any], *args: Any) -> Any:
    """Run `function(*args)` in `nproc` processes with torchrun's variables set, and return what rank 0 returns.

    A signal to this process reaches each of them once, as the same signal; Ctrl-C in a terminal too, because they have
    sessions of their own, out of its reach. They have all the time they need to save, as one process has: whoever sends
    SIGTERM sets a limit, and the watchdog ends one that is stuck. A second Ctrl-C kills them at once, and so does any
    signal before all of them are there.

    Args:
        nproc: processes to start, at least 1.
        function: importable from a module, as are its arguments' types; each process starts afresh (spawn).
        args: the same for every process.

    Raises:
        Stopped: the processes saved and ended because of a signal; rank 0's.
        ConfigError: a process raised one.
        WorkerFailed: a process failed otherwise, or was killed.
        KeyboardInterrupt: Ctrl-C ended them before there was anything to save, or a second one did.
        SystemExit: another signal did; its code is 128 + its number.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        start_method="spawn",
    )
    # Started here, because starting it lets SIGINT through to the thread that does.
    resource_tracker.ensure_running()
    with (
        noted_signals() as noted,
        tempfile.TemporaryDirectory(prefix="foundry-") as folder,
        _quiet_elastic(),
        _threads_per_process(nproc),
        # Elastic installs no handlers outside the main thread; this one's mask is what the processes start with.
        ThreadPoolExecutor(1, initializer=signal.pthread_sigmask, initargs=(signal.SIG_BLOCK, {signal.SIGINT})) as pool,
    ):
        future = pool.submit(elastic_launch(config, _work), function, args, folder)
        killed = _pass_on(noted, future, Path(folder), nproc)
        if killed and future.exception() is not None:
            raise ended_by(noted[0])
        try:
            answer = future.result()[0]
        except ChildFailedError as failed:
            if _is_due_to_signal(noted, Path(folder), failed):
                raise ended_by(noted[0]) from None
            raise _first_cause(Path(folder), failed) from None
    if isinstance(answer, Stopped):
        raise answer
    return answer


def _work(function: Callable[..., Any], args: tuple[Any, ...], folder: str) -> Any:
    """In the process: run, and leave a note in `folder` where that fails.

    Returns:
        What the function returns; or the Stopped that it raised, for which elastic would end the other processes.
    """
    try:
        _join_session(Path(folder))
        return function(*args)
    except Stopped as stopped:
        return stopped
    except KeyboardInterrupt:
        # torch.multiprocessing would swallow it, and elastic wait for an answer.
        raise SystemExit(128 + signal.SIGINT) from None
    except BaseException as error:
        if not (isinstance(error, SystemExit) and error.code in (0, None)):
            _leave_note(error, Path(folder))
        raise


def _join_session(folder: Path) -> None:
    """In the process: take signals from the parent only, and tell it so by a file named after this process's number.

    SIGINT is held back until here, so that Ctrl-C during imports prints no traceback. One that came is dropped: the
    parent has it too.
    """
    os.setsid()
    _end_with_parent()
    signal.sigtimedwait({signal.SIGINT}, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    (folder / f"{os.getpid()}{_PROCESS}").touch()


def _end_with_parent() -> None:
    """Have Linux kill this process if the one that started it is killed: nobody could stop it, or start it again."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def noted_signals() -> Iterator[list[signal.Signals]]:
    """The signals that come meanwhile, in order; one that is ignored, as under nohup, stays so."""
    noted: list[signal.Signals] = []

    def note(signum: int, frame: FrameType | None) -> None:
        noted.append(signal.Signals(signum))

    before = {signum: signal.getsignal(signum) for signum in _SIGNALS}
    for signum, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(signum, note)
    try:
        yield noted
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _pass_on(noted: list[signal.Signals], future: "Future[Any]", folder: Path, nproc: int) -> bool:
    """Send each signal to every process, until `future` is there; returns whether the processes were killed instead."""
    num_passed, killing = 0, False
    while not future.done():
        wait([future], _POLL_SECONDS)
        new = noted[num_passed:]
        num_passed += len(new)
        workers = [int(path.stem) for path in folder.glob(f"*{_PROCESS}")]
        killing = killing or noted.count(signal.SIGINT) > 1 or (bool(new) and len(workers) < nproc)
        if killing:
            for process in multiprocessing.active_children():
                process.kill()
        else:
            for pid, signum in itertools.product(workers, new):
                with suppress(ProcessLookupError):
                    os.kill(pid, signum)
    return killing


def _is_due_to_signal(noted: list[signal.Signals], folder: Path, failed: Any) -> bool:
    """Whether the processes ended because of a signal that found nothing to save, and not of an error of their own."""
    ends = {code for signum in noted for code in (-signum, 128 + signum)}
    silent_ones_too = all(failure.exitcode in ends for failure in _silent(folder, failed).values())
    return bool(noted) and silent_ones_too and all(map(_is_consequence, _notes(folder)))


def ended_by(signum: signal.Signals) -> BaseException:
    """What a process raises that ends because of a signal: the shell's exit code for it comes of that."""
    return KeyboardInterrupt() if signum is signal.SIGINT else SystemExit(128 + signum)


def _leave_note(error: BaseException, folder: Path) -> None:
    note: dict[str, Any] = {
        "rank": int(os.environ["RANK"]),
        "time": time.time(),
        "kind": type(error).__name__,
        "reason": last_line(error),
        "trace": "".join(traceback.format_exception(error)),
    }
    if isinstance(error, ConfigError):
        note["violations"] = [(violation.key, violation.message) for violation in error.violations]
    (folder / f"rank{note['rank']}.json").write_text(json.dumps(note), encoding="utf-8")


def _first_cause(folder: Path, failed: Any) -> Exception:
    """The error to show: a user's mistake, else the earliest that is not the consequence of another rank's end."""
    notes = _notes(folder)
    for note in notes:
        if "violations" in note:
            return ConfigError([Violation(key, message) for key, message in note["violations"]])
    causes = [note for note in notes if not _is_consequence(note)]
    for rank, failure in () if causes else _silent(folder, failed).items():
        return WorkerFailed(rank, how_it_ended(failure.exitcode))
    if not notes:
        rank, failure = failed.get_first_failure()
        return WorkerFailed(rank, how_it_ended(failure.exitcode))
    first = min(causes or notes, key=lambda note: note["time"])
    return WorkerFailed(first["rank"], first["reason"], first["trace"])


def _notes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("rank*.json")]


def _silent(folder: Path, failed: Any) -> dict[int, Any]:
    """The failures, by rank, of processes that left no note."""
    return {rank: end for rank, end in failed.failures.items() if not (folder / f"rank{rank}.json").exists()}


def is_consequence(kind: str, reason: str) -> bool:
    """Whether a rank's error, of class `kind`, only says that another rank is gone."""
    return kind in _CONSEQUENCES or any(text in reason for text in _CONSEQUENCE_TEXTS)


def _is_consequence(note: dict[str, Any]) -> bool:
    return is_consequence(note["kind"], note["reason"])


def how_it_ended(exitcode: int) -> str:
    """What an exit code, negative for a signal, says of a process that left no word."""
    if exitcode < 0:
        name = signal.Signals(-exitcode).name
        return f"killed by {name}" + (": out of memory?" if name == "SIGKILL" else "")
    return f"ended with exit code {exitcode}"


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Keep elastic's own tracebacks off the terminal: a process's error says what is wrong.

    Its loggers set their own levels and handlers, so only the switch for all of logging reaches them; this process does
    nothing but wait meanwhile.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _threads_per_process(nproc: int) -> Iterator[None]:
    """Share the cores among the processes, which inherit the environment; a number the user has set stays."""
    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // nproc))
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
