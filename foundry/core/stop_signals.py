"""Handling of signals that ask a run to stop, which a scheduler sends to all processes of a job, and their exception.

Training processes stop. Helper processes, which read data, score answers or send metrics, continue: the run may need
them until its next checkpoint. They end when the run does.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Literal

from foundry.core.exit_codes import ExitCode, code_of_signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Stopped(SystemExit):
    """A signal ends the run, after a checkpoint if the run saves any. The run has not failed, and it has no result.

    It derives from SystemExit, so that the process gets the exit code under any launcher: Hydra's `run_job` and
    submitit catch only `Exception`. So after Ctrl-C a sweep ends instead of continuing with the next job, and no
    traceback is printed. The exit code is the shell's for a process that a signal ended: 130 for Ctrl-C, 143 for
    SIGTERM, 138 and 140 for SIGUSR1 and SIGUSR2, unlike those for finished (0), failed (1) and refused (2). The
    exception can be pickled, to be passed between processes.

    Attributes:
        signum: the signal.
        step: optimizer steps done.
        checkpoint: checkpoint to resume from; None if the run saves no checkpoints, or could not save this one.
        state: state for status.json: `requeued` if a scheduler restarts the job by itself, else `stopped`.
    """

    def __init__(
        self, signum: signal.Signals, step: int, checkpoint: Path | None, state: Literal["stopped", "requeued"]
    ) -> None:
        super().__init__(signum, step, checkpoint, state)
        self.signum = signum
        self.step = step
        self.checkpoint = checkpoint
        self.state = state
        self.code: int = code_of_signal(signum)

    @property
    def reason(self) -> str:
        """Name of the signal, as the reason in status.json."""
        return self.signum.name

    def __str__(self) -> str:
        outcome = "nothing was saved" if self.checkpoint is None else f"the checkpoint is {self.checkpoint}"
        return f"stopped by {self.signum.name} after step {self.step}; {outcome}"


@contextmanager
def restored_handlers() -> Iterator[None]:
    """Restore the handlers of the stop signals after the body, which may replace them. For the main thread only."""
    previous_handlers = {
        signum: handler for signum in STOP_SIGNALS if (handler := signal.getsignal(signum)) is not None
    }
    try:
        yield
    finally:
        for signum, handler in previous_handlers.items():
            signal.signal(signum, handler)


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Block the stop signals during the body, in this thread and in new processes until they call `outlive`."""
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def ignore() -> None:
    """Ignore the stop signals for the rest of this process, which is about to end, and in the programs it starts."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def outlive() -> None:
    """Ignore stop signals while the parent process is alive; if it has ended, exit on a stop signal.

    The parent ends this process by SIGKILL. Processes started or forked from here handle the signals by default.
    """
    parent = os.getppid()

    def ignore(number: int, frame: FrameType | None) -> None:
        if os.getppid() != parent:
            os._exit(code_of_signal(number))

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def handle_by_default() -> None:
        for signum in STOP_SIGNALS:
            signal.signal(signum, signal.SIG_DFL)
        unblock()

    for signum in STOP_SIGNALS:
        signal.signal(signum, ignore)  # programs started from here would inherit SIG_IGN or a blocked signal
    unblock()
    os.register_at_fork(  # a signal to a new process remains pending until its handler is the default one
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS),
        after_in_parent=unblock,
        after_in_child=handle_by_default,
    )


def end_with_parent(parent: int | None = None) -> None:
    """Make Linux kill this process when its parent ends for any reason.

    Args:
        parent: process id of the parent; if the parent has already ended, this process exits. None skips this check.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        sys.exit(ExitCode.FAILED)


@contextmanager
def signals_as_exit() -> Iterator[None]:
    """Raise SystemExit with 128 + the signal's number on SIGTERM or SIGHUP, so that `finally` blocks run.

    Can be used in the main thread only.
    """

    def raise_exit(number: int, frame: FrameType | None) -> None:
        raise SystemExit(code_of_signal(number))

    with restored_handlers():
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, raise_exit)
        yield
