"""Signals: noticed at once, acted on at a step boundary.

| signal | who sends it | what becomes of the run |
|---|---|---|
| SIGINT | a person, Ctrl-C; a second one ends the process at once | stopped |
| SIGHUP | a terminal that closes, a connection that breaks; nothing under nohup | stopped |
| SIGTERM | a person, Docker, Slurm | stopped; requeued where Slurm will start the job again |
| SIGUSR1, SIGUSR2 | a scheduler before its time limit, as submitit asks Slurm to | stopped; requeued by submitit |
"""

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from enum import IntFlag
from types import FrameType, TracebackType
from typing import Any, Literal, Self

from foundry.config.environment import is_local_submitit
from foundry.core.stop_signals import ignore
from foundry.core.stopped import Stopped

log = logging.getLogger(__name__)

_PARKED_SECONDS = 120.0
"""submitit gives `scontrol requeue` 60 s; Slurm then ends all tasks."""
_ASKING_SECONDS = 5.0
"""So much later than rank 0 begins to ask Slurm the others leave: a task that leaves may have srun end them all."""


class Boundary(IntFlag):
    """What a rank has to say at a step boundary; combined over ranks by bitwise or."""

    SAVE = 1
    STOP_INT = 2
    STOP_HUP = 4
    STOP_TERM = 8
    STOP_USR1 = 16
    STOP_USR2 = 32
    TIME = 64

    @property
    def signum(self) -> signal.Signals | None:
        """The signal that asks to stop; of several, as when Slurm adds SIGTERM, the one that may lead to a requeue."""
        return next((signum for signum, flag in reversed(_FLAGS.items()) if flag & self), None)


_FLAGS = {
    signal.SIGINT: Boundary.STOP_INT,
    signal.SIGHUP: Boundary.STOP_HUP,
    signal.SIGTERM: Boundary.STOP_TERM,
    signal.SIGUSR1: Boundary.STOP_USR1,
    signal.SIGUSR2: Boundary.STOP_USR2,
}


class SignalHandler:
    """Notes the first signal that asks this process to stop, from entering to leaving.

    The handlers only set a field: a signal comes between any two bytecodes, where logging or writing could deadlock. A
    second SIGINT ends the process with exit code 130 as it is. On leaving, the handlers from before are back; except
    where a signal has stopped the run: what it asked for is being done, and a second copy of it, as where a scheduler
    signals all processes of a job and a launcher passes its own on, must not kill the process before it has said so.
    Python handles signals in the main thread only; in another this notes nothing and logs so.

    Attributes:
        requested: the first signal that came; None so far.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._interrupts = 0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            log.warning("not in the main thread: signals will not be noticed, and end the run without a checkpoint")
            return self
        for signum in _FLAGS:
            if signum is not signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:
                self._previous[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_ending = kind is not None and issubclass(kind, Stopped)
        for signum, handler in self._previous.items():
            if not (is_ending and handler is signal.SIG_DFL):
                signal.signal(signum, handler)

    @property
    def flags(self) -> Boundary:
        """This rank's part of what the ranks agree on; it stays once a signal came."""
        return Boundary(0) if self.requested is None else _FLAGS[self.requested]

    def state_after(self, signum: signal.Signals) -> Literal["stopped", "requeued"]:
        """What to record of a run that `signum` stopped, to be asked on rank 0 after the save.

        submitit puts the job back where it handles the signal. It ignores SIGTERM, which Slurm sends when it preempts
        or requeues a job by itself, and when somebody cancels it: `scontrol show job` tells them apart. Nothing but the
        record depends on the answer: the checkpoint is the same.
        """
        if self._handler_to_call(signum) is not None or (signum is signal.SIGTERM and _slurm_will_requeue()):
            return "requeued"
        return "stopped"

    def hand_over(self, signum: signal.Signals, *, is_main: bool) -> bool:
        """Have the job queued again where that is due; called by every rank after the save and the record.

        Where submitit handles `signum`, rank 0 calls its handler, which writes the job down again and runs `scontrol
        requeue`. From then on this process heeds no signal: a scheduler may signal all processes of a task again, and
        a requeue that is ordered brings SIGTERM. The other ranks sleep until Slurm ends them: continuing would train
        past the checkpoint, and leaving could have srun end rank 0 too early. Without Slurm they leave: submitit waits
        for all of them before it starts the job again.

        A job that Slurm preempts it requeues itself, but only if it is still there when the grace time ends; one that
        leaves before, its work saved, has to ask for it, or it has simply failed.

        Args:
            signum: the signal that the ranks agreed on; this rank itself need not have received it.
            is_main: whether this is rank 0.

        Returns:
            Whether submitit was there to hand over to; on rank 0 its handler does not return in that case.

        Raises:
            SystemExit: from submitit, whose job is queued again.
            submitit.core.utils.UncompletedJobError: from submitit, which has no attempts left.
        """
        handler = self._handler_to_call(signum)
        if handler is None:
            if signum is signal.SIGTERM and (job := os.environ.get("SLURM_JOB_ID")):
                _leave_preempted(job, is_main=is_main)
            return False
        if is_main:
            self._previous.clear()
            ignore()
            handler(signum, None)
        elif not is_local_submitit():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(_PARKED_SECONDS)
        return True

    def _handler_to_call(self, signum: signal.Signals) -> Callable[[int, FrameType | None], Any] | None:
        """The handler of `signum` by which submitit requeues; None where it ignores the signal or is not there.

        Its names are from https://github.com/facebookincubator/submitit/blob/main/submitit/core/job_environment.py.
        """
        handler = self._previous.get(signum)
        requeues = callable(handler) and getattr(handler, "__name__", "").startswith("checkpoint_and_")
        return handler if requeues else None

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested = signal.Signals(signum)
        if signum == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                os._exit(128 + signum)


def _slurm_will_requeue() -> bool:
    """Whether this is a job that Slurm has requeued, or is preempting, after which it is requeued.

    A requeue counts as a restart when it is ordered, before SIGTERM comes; within a grace time PreemptTime is set.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return False
    fields = _asked(job)
    requeued = int(fields.get("Restarts", 0)) > int(os.environ.get("SLURM_RESTART_COUNT", 0))
    return requeued or _is_preempted(fields)


def _is_preempted(fields: dict[str, str]) -> bool:
    return fields.get("PreemptTime", "None") != "None" and fields.get("Requeue") == "1"


def _leave_preempted(job: str, *, is_main: bool) -> None:
    """Have a job that is being preempted queued again before this process leaves; nothing for any other job."""
    if not is_main:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_ASKING_SECONDS)
    elif _is_preempted(_asked(job)):
        _scontrol("requeue", job)


def _asked(job: str) -> dict[str, str]:
    """What Slurm's controller says of a job; nothing where it does not answer."""
    message = _scontrol("show", "job", "--oneliner", job)
    return dict(word.split("=", 1) for word in message.split() if "=" in word)


def _scontrol(*arguments: str) -> str:
    try:
        # In a session of its own, out of reach of the signals that come to this task.
        return subprocess.run(
            ["scontrol", *arguments], capture_output=True, text=True, timeout=10, check=True, start_new_session=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
