"""Signals that ask a run to stop: a scheduler sends them to all processes of a job, and those that train heed them.

The others, which read data, score answers or deliver metrics, go on: the run may still need them to come to its next
checkpoint. They end when the run does.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@contextmanager
def held_back() -> Iterator[None]:
    """For this thread and the processes that it starts meanwhile, until those call `outlive`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore() -> None:
    """Ignore them for the rest of this process, which is about to end, and in programs that it starts meanwhile."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def outlive() -> None:
    """From here on they do not end this process, as long as the one that started it is there to do that, by SIGKILL.

    What this one starts or forks heeds them as ever.
    """
    parent = os.getppid()

    def ignore(number: int, frame: FrameType | None) -> None:
        if os.getppid() != parent:
            os._exit(128 + number)

    for signum in STOP_SIGNALS:
        signal.signal(signum, ignore)  # not SIG_IGN, nor blocked, which a program that is started here would inherit
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.register_at_fork(after_in_child=lambda: [signal.signal(signum, signal.SIG_DFL) for signum in STOP_SIGNALS])


def end_with_parent(parent: int | None = None) -> None:
    """Have Linux kill this process when the one that started it ends, however that ends.

    Args:
        parent: process ID of that one; if it has ended already, this process exits. None: do not check.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        sys.exit(1)


@contextmanager
def raised() -> Iterator[None]:
    """Raise SystemExit with 128 + the signal's number on SIGTERM or SIGHUP, so that `finally` blocks run.

    Only for the main thread.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
