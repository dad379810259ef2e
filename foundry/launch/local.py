"""Several processes (ranks) on this machine."""

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

from foundry.config.environment import STORE, default_variables, detect
from foundry.core.errors import ConfigError, Violation, format_reason
from foundry.core.exit_codes import ExitCode, code_of_signal
from foundry.core.safe_path import VARIABLE
from foundry.core.stop_signals import STOP_SIGNALS, Stopped, end_with_parent, restored_handlers
from foundry.run_dir.ends import ERROR_FILE, NOTES, is_consequence, leave_note

_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 5.0  # from the first failure until SIGTERM to the other ranks, which may fail as a consequence
_SECONDS_FOR_THE_CAUSE = 3.0  # torchrun looks at its processes every 0.1 s
_LAST_PATIENCE_SECONDS = 15.0  # from the first failure until SIGKILL; a process that is suspended ignores SIGTERM
START = multiprocessing.get_context("spawn")  # CUDA's state does not survive a fork
_PROCESS = ".process"
_RESULT = "answer"


class WorkerFailed(RuntimeError):
    """A process failed with an error or was killed.

    Attributes:
        rank: rank of the process.
        reason: one line about its error, or about its exit code or the signal that killed it.
        trace: traceback of its error; empty if the process recorded no error.
        exit_code: exit code for the whole run.
        kind: class name of its error; empty if the process recorded no error.
        was_stopped: whether a signal had asked all processes to stop before the failure.
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
    """Return the traceback of a failed run; with several ranks, that of the rank that failed."""
    if isinstance(error, WorkerFailed):
        return f"{error}\n{error.trace}"
    return "".join(traceback.format_exception(error))


def run_local(nproc: int, function: Callable[..., Any], *args: Any) -> Any:
    """Run `function(*args)` in `nproc` processes with torchrun's environment variables; return the result of rank 0.

    The ranks rendezvous through a file in a folder that only this user can access, so the rendezvous needs no port. If
    a launcher has started one process on each of several nodes, they are the ranks of this node, and rendezvous at the
    address that the launcher gives.

    Each signal to this process is forwarded once to every rank, unchanged. Ctrl-C in a terminal is forwarded too: it
    does not reach the ranks directly, because each rank has its own session. The time to save is not limited here: the
    sender of SIGTERM sets a limit, and the watchdog ends a rank that hangs. A second Ctrl-C kills the ranks at once,
    and so does any signal before all ranks have started.

    Args:
        nproc: number of processes, at least 1.
        function: must be importable from a module, like the types of its arguments, because processes are spawned.
        args: arguments, the same for every process.

    Returns:
        The return value of `function` on the first rank of this node.

    Raises:
        Stopped: a signal stopped the run after saving; the exception comes from the first rank of this node.
        ConfigError: a process raised it.
        WorkerFailed: a process failed with another error, or was killed.
        KeyboardInterrupt: Ctrl-C ended the processes before a run was ready to save, or a second Ctrl-C killed them.
        SystemExit: another signal ended or killed the processes before a run could save; the code is 128 + its number.
    """
    # Start the resource tracker now, because its start unblocks SIGINT, which `_start` blocks later.
    with default_variables({VARIABLE: "1"}):
        resource_tracker.ensure_running()
    with (
        collect_signals() as signals,
        tempfile.TemporaryDirectory(prefix="foundry-") as name,  # its mode is 0700
        # The processes share the cores and inherit this variable.
        default_variables({"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // nproc))}),
    ):
        folder, ranks = Path(name), dict[int, BaseProcess]()
        try:
            _start(ranks, nproc, (function, args, folder))
            ends, killed = _wait(ranks, signals, folder)
        finally:
            for process in ranks.values():
                if process.is_alive():
                    process.kill()
                process.join()
        if any(ends.values()):
            if killed or _is_due_to_signal(signals, folder, ends):
                raise signal_exception(signals[0])
            cause = _first_cause(folder, ends)
            if isinstance(cause, WorkerFailed):
                cause.was_stopped = bool(signals)
            raise cause
        if not (folder / _RESULT).exists():  # `os._exit(0)`, or `sys.exit(0)` outside of a run
            raise WorkerFailed(_first_rank(), f"{describe_exit(0)} before the end of the run")
        result = pickle.loads((folder / _RESULT).read_bytes())  # trusted: the folder has mode 0700
    if isinstance(result, Stopped):
        raise result
    return result


def _start(ranks: dict[int, BaseProcess], nproc: int, work: tuple[Any, ...]) -> None:
    """Start the processes with SIGINT blocked in them and, meanwhile, in this process, and add them by rank."""
    with block_interrupts(), default_variables({VARIABLE: "1"}):
        for local_rank in range(nproc):
            process = START.Process(target=_work, args=(local_rank, nproc, *work))
            process.start()
            ranks[_first_rank() + local_rank] = process


def _first_rank() -> int:
    """Return the first rank of this node: 0 unless the ranks are on several nodes."""
    environment = detect()
    return environment.rank if environment.starts_one_per_node else 0


def _rank_variables(local_rank: int, nproc: int, folder: Path) -> dict[str, str]:
    """Return torchrun's variables for a rank, and foundry's own."""
    environment = detect()
    rank, world_size = _first_rank() + local_rank, nproc
    variables = {NOTES: str(folder)}
    if environment.starts_one_per_node and environment.num_nodes > 1:
        world_size = environment.world_size
        variables |= {"MASTER_ADDR": environment.master_addr, "MASTER_PORT": str(environment.master_port)}
        variables |= {STORE: ""}  # started by foundry, without a rendezvous file
    else:
        variables |= {STORE: str(folder / "store")}
    variables |= {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
    return variables | {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(nproc)}


@contextmanager
def block_interrupts() -> Iterator[None]:
    """Block Ctrl-C during the body, in this process and in the processes that it starts, until they unblock it."""
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def begin_session() -> None:
    """Move this process to a new session, which the terminal's Ctrl-C does not reach, and unblock SIGINT.

    For a process that was started with SIGINT blocked. A pending SIGINT is dropped, because the parent has received it
    too and forwards it.
    """
    os.setsid()
    signal.sigtimedwait({signal.SIGINT}, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _work(local_rank: int, nproc: int, function: Callable[..., Any], args: tuple[Any, ...], folder: Path) -> None:
    """Entry point of a rank: run the function, and write the first rank's result or a failure note to `folder`.

    `Stopped` counts as a result.
    """
    os.environ |= _rank_variables(local_rank, nproc, folder)
    codes: list[int] = []
    atexit.register(_end_without_destructors, codes)  # runs after all handlers that are registered later
    try:
        _join_session(folder)
        try:
            result = function(*args)
        except Stopped as stopped:
            result = stopped
        if local_rank == 0:
            (folder / _RESULT).write_bytes(pickle.dumps(result))
    except KeyboardInterrupt:
        codes.append(ExitCode.SIGINT)
        sys.exit(codes[0])
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (0, None):
            raise
        report_failure(error)
        codes.append(exit_code_of(error))
        sys.exit(codes[0])  # do not raise: multiprocessing would print the traceback, which the parent reports


def _end_without_destructors(codes: list[int]) -> None:
    """End a failed rank before the destructors of its libraries run.

    A failed rank is still in its process group. At exit, C++ would end the group's threads with an error message.
    """
    if codes:
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # stream missing, pipe broken, or stream closed
                stream.flush()
        os._exit(codes[0])


def _join_session(folder: Path) -> None:
    """Receive signals from the parent only, and report readiness by creating a file named after this process's pid.

    SIGINT is blocked until here, so that Ctrl-C during imports does not print a traceback.
    """
    end_with_parent()
    begin_session()
    (folder / f"{os.getpid()}{_PROCESS}").touch()


@contextmanager
def collect_signals() -> Iterator[list[signal.Signals]]:
    """Collect the stop signals that arrive during the body, in order; ignored signals (nohup) stay ignored."""
    signals: list[signal.Signals] = []

    def note(signum: int, frame: FrameType | None) -> None:
        signals.append(signal.Signals(signum))

    with restored_handlers():
        for signum in STOP_SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, note)
        yield signals


def _wait(ranks: dict[int, BaseProcess], signals: list[signal.Signals], folder: Path) -> tuple[dict[int, int], bool]:
    """Wait for all processes to end, and forward each signal to all of them.

    After the first failure the other processes get a few seconds to fail too, because their errors may contain the
    cause; then they get SIGTERM, and later SIGKILL.

    Returns:
        The exit codes by rank of the processes that ended by themselves, in order of their ends, and whether a signal
        made this function kill all processes.
    """
    ends = dict[int, int]()
    failed_at = math.inf
    is_ending = False
    num_passed = 0
    is_killing = False
    while True:
        alive = []
        for rank, process in ranks.items():
            if process.exitcode is None:
                alive.append(process)
            elif not is_ending:
                ends.setdefault(rank, process.exitcode)
        if not alive:
            return ends, is_killing
        if any(ends.values()):
            failed_at = min(failed_at, time.monotonic())
        new_signals = signals[num_passed:]
        num_passed += len(new_signals)
        num_ready = len(list(folder.glob(f"*{_PROCESS}")))
        is_killing = is_killing or signals.count(signal.SIGINT) > 1 or (bool(new_signals) and num_ready < len(ranks))
        elapsed_seconds = time.monotonic() - failed_at
        if elapsed_seconds > _PATIENCE_SECONDS and not is_ending:
            new_signals, is_ending = [*new_signals, signal.SIGTERM], True
        for process in alive:
            if is_killing or elapsed_seconds > _LAST_PATIENCE_SECONDS:
                process.kill()
            elif process.pid is not None:
                for signum in new_signals:
                    os.kill(process.pid, signum)  # the pid is still valid, because the process has not been reaped
        connection.wait([process.sentinel for process in alive], _POLL_SECONDS)


def _is_due_to_signal(signals: list[signal.Signals], folder: Path, ends: dict[int, int]) -> bool:
    """Return whether a signal ended the processes before a run could save, and no process failed with its own error."""
    signal_codes = {code for signum in signals for code in (-signum, code_of_signal(signum))}
    are_silent_ends_due = all(code in signal_codes for code in _ends_without_note(folder, ends).values())
    return bool(signals) and are_silent_ends_due and all(map(_is_consequence, _read_notes(folder)))


def signal_exception(signum: signal.Signals) -> BaseException:
    """Return the exception to raise in a process that a signal ends; it gives the shell's exit code for the signal."""
    return KeyboardInterrupt() if signum is signal.SIGINT else SystemExit(code_of_signal(signum))


def report_failure(error: BaseException, exit_code: int | None = None) -> None:
    """Report the failure of this process to the process that started it: foundry, or an agent of torchrun.

    torchrun reports the error with the earliest time, and ends the other ranks when it sees the first failure. So a
    rank that only lost another one waits, and torchrun sees the cause first.

    Args:
        error: the error.
        exit_code: exit code of this process; None for the code of the error.
    """
    exit_code = exit_code_of(error) if exit_code is None else exit_code
    if ERROR_FILE in os.environ and NOTES not in os.environ and _has_lost_rank(error):
        time.sleep(_SECONDS_FOR_THE_CAUSE)
    violations = error.violations if isinstance(error, ConfigError) else ()
    leave_note(
        kind=getattr(error, "kind", "") or type(error).__name__,
        reason=str(error) if isinstance(error, WorkerFailed | Stopped) else format_reason(error),
        exit_code=exit_code,
        trace="" if isinstance(error, Stopped) or exit_code == ExitCode.REFUSED else format_trace(error),
        rank=error.rank if isinstance(error, WorkerFailed) else None,
        violations=[(violation.key, violation.message) for violation in violations],
    )


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that ends with an error.

    A task of a Slurm step that only lost another rank has the lowest code of a failure: srun reports the highest code
    of its tasks, and the code of the cause must be that one.
    """
    if isinstance(error, WorkerFailed):
        return error.exit_code
    if isinstance(error, Stopped):
        return error.code
    if isinstance(error, ConfigError):
        return ExitCode.REFUSED
    is_loss = _has_lost_rank(error) and detect().launcher != "slurm"
    return ExitCode.RANK_LOST if is_loss else ExitCode.FAILED


def _has_lost_rank(error: BaseException) -> bool:
    if isinstance(error, WorkerFailed | Stopped | ConfigError):
        return False
    return is_consequence(type(error).__name__, format_reason(error)) and detect().world_size > 1


def _first_cause(folder: Path, ends: dict[int, int]) -> Exception:
    """Return the error to report: a config error, else the earliest error that does not follow from another rank's end.

    Without such an error, report a process that ended without a note, or else the earliest error.
    """
    notes = _read_notes(folder)
    for note in notes:
        if note["violations"]:
            return ConfigError([Violation(key, message) for key, message in note["violations"]])
    causes = [note for note in notes if not _is_consequence(note)]
    for rank, code in () if causes else _ends_without_note(folder, ends).items():
        return WorkerFailed(rank, describe_exit(code), exit_code=ExitCode.RANK_LOST if code < 0 else ExitCode.FAILED)
    first = min(causes or notes, key=lambda note: note["time"])
    return WorkerFailed(first["rank"], first["reason"], first["trace"], first["exit_code"], first["kind"])


def _read_notes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("rank*.json")]


def _ends_without_note(folder: Path, ends: dict[int, int]) -> dict[int, int]:
    """Return the exit codes by rank of the processes that failed without a note."""
    return {rank: code for rank, code in ends.items() if code and not (folder / f"rank{rank}.json").exists()}


def _is_consequence(note: dict[str, Any]) -> bool:
    return is_consequence(note["kind"], note["reason"])


def describe_exit(exitcode: int) -> str:
    """Describe the end of a process that recorded no reason, from its exit code (negative for a signal)."""
    if exitcode < 0:
        is_named = -exitcode in set(signal.Signals)  # real-time signals have no names
        name = signal.Signals(-exitcode).name if is_named else f"signal {-exitcode}"
        return f"killed by {name}" + (": out of memory?" if name == "SIGKILL" else "")
    return f"ended with exit code {exitcode}"
