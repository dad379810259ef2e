"""Signal handling: signals are recorded at once and acted on at a step boundary.

Several ranks combine their signals at step boundaries and see the result one step late. Then the run is saved and
recorded, the job is passed to submitit if submitit handles the signal, and the process exits with 128 + the signal's
number.

| signal | sender | effect on the run |
|---|---|---|
| SIGINT | a person, Ctrl-C; a second one ends the process at once | stopped |
| SIGHUP | a closed terminal or a lost connection; no effect under nohup | stopped |
| SIGTERM | a person, Docker, Slurm | stopped; requeued if Slurm will start the job again |
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

from foundry.config.environment import STORE, detect, is_local_submitit
from foundry.core.exit_codes import code_of_signal
from foundry.core.stop_signals import Stopped, ignore

log = logging.getLogger(__name__)

_PARKED_SECONDS = 120.0
"""Sleep of ranks above 0 during a requeue: submitit gives `scontrol requeue` 60 s, after which Slurm ends all tasks."""
_QUERY_SECONDS = 5.0
"""Delay of the other ranks after rank 0 begins to query Slurm: if a task exits earlier, srun may end all tasks."""
_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Environment variable that torchrun sets."""


class Boundary(IntFlag):
    """Requests of a rank at a step boundary; combined over ranks by bitwise or."""

    SAVE = 1
    STOP_INT = 2
    STOP_HUP = 4
    STOP_TERM = 8
    STOP_USR1 = 16
    STOP_USR2 = 32
    TIME = 64

    @property
    def signum(self) -> signal.Signals | None:
        """Signal that asks to stop, or None; of several, as when Slurm adds SIGTERM, one that may lead to a requeue."""
        return next((signum for signum, flag in reversed(_FLAGS.items()) if flag & self), None)


_FLAGS = {
    signal.SIGINT: Boundary.STOP_INT,
    signal.SIGHUP: Boundary.STOP_HUP,
    signal.SIGTERM: Boundary.STOP_TERM,
    signal.SIGUSR1: Boundary.STOP_USR1,
    signal.SIGUSR2: Boundary.STOP_USR2,
}


class SignalHandler:
    """Context manager that records the first signal that asks this process to stop.

    The handlers only set a field: a signal arrives between any two bytecodes, and logging or writing at that time could
    deadlock. A second SIGINT ends the process at once with exit code 130.

    On exit, the previous handlers are restored. After a signal has stopped the run, default handlers are not: if a
    scheduler signals all processes of a job and a launcher also forwards its own signal, the second signal must not
    kill the process before it has reported its end.

    Python handles signals in the main thread only; in another thread this class records nothing and logs a warning.

    Attributes:
        requested: the first signal received; None if none was.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._interrupts = 0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            log.warning("not in the main thread: signals end the run without a checkpoint")
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
        """Flag of the first signal that this rank received, for the exchange between ranks; 0 before any signal."""
        return Boundary(0) if self.requested is None else _FLAGS[self.requested]

    def state_after(self, signum: signal.Signals) -> Literal["stopped", "requeued"]:
        """Return the state to record for a run that `signum` stopped; called on rank 0 after the save.

        submitit requeues the job at the signals that it handles. It ignores SIGTERM, which Slurm sends if Slurm itself
        preempts or requeues a job, and also if a user cancels the job; `scontrol show job` distinguishes these cases.
        Only the recorded state depends on the returned value: the checkpoint is the same.
        """
        if self._handler_to_call(signum) is not None or (signum is signal.SIGTERM and _slurm_will_requeue()):
            return "requeued"
        return "stopped"

    def hand_over(self, signum: signal.Signals, *, is_main: bool) -> bool:
        """Requeue the job if necessary; every rank calls this after the save and the record.

        If submitit handles `signum`, rank 0 calls its handler, which pickles the job again and runs `scontrol requeue`.
        From then on this process ignores signals: a scheduler may signal all processes of a task again, and a requeue
        sends SIGTERM. The other ranks sleep until Slurm ends them: if they continued, they would train past the
        checkpoint, and if they exited, srun might end rank 0 too early. Without Slurm the other ranks return, since
        submitit waits for all ranks before it starts the job again.

        Slurm requeues a job that it preempts only if the job still runs when the grace time ends. A job that exits
        earlier, with its work saved, has to request the requeue; otherwise it counts as failed.

        Args:
            signum: signal that the ranks agreed on; this rank may not have received it.
            is_main: True on rank 0.

        Returns:
            True if submitit handles the signal; on rank 0, submitit's handler raises instead of returning.

        Raises:
            SystemExit: raised by submitit after it has requeued the job.
            submitit.core.utils.UncompletedJobError: raised by submitit if no attempts are left.
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
        """Return submitit's handler of `signum` that requeues; None if submitit ignores the signal or is not in use.

        The handlers' names are from
        https://github.com/facebookincubator/submitit/blob/main/submitit/core/job_environment.py.
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
                os._exit(code_of_signal(signum))


def _slurm_will_requeue() -> bool:
    """Return True if Slurm has requeued this job, or is preempting it and will requeue it.

    Slurm counts a requeue as a restart when it is ordered, before SIGTERM arrives; during a grace time PreemptTime is
    set.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return False
    fields = _query_job(job)
    requeued = int(fields.get("Restarts", 0)) > int(os.environ.get("SLURM_RESTART_COUNT", 0))
    return requeued or _is_preempted(fields)


def _is_preempted(fields: dict[str, str]) -> bool:
    return fields.get("PreemptTime", "None") != "None" and fields.get("Requeue") == "1"


def _leave_preempted(job: str, *, is_main: bool) -> None:
    """On rank 0, request a requeue if Slurm is preempting this job; on other ranks, wait for rank 0's query.

    They do not wait if one agent of torchrun or one process of foundry has started all ranks: it lets rank 0 continue.
    """
    if not is_main:
        if detect().num_nodes > 1 or not {STORE, _TORCHRUN}.intersection(os.environ):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(_QUERY_SECONDS)
    elif _is_preempted(_query_job(job)):
        _scontrol("requeue", job)


def _query_job(job: str) -> dict[str, str]:
    """Return the fields of `scontrol show job`; empty if the controller does not answer."""
    message = _scontrol("show", "job", "--oneliner", job)
    return dict(field.split("=", 1) for field in message.split() if "=" in field)


def _scontrol(*arguments: str) -> str:
    try:
        # scontrol has its own session, so that signals sent to this task do not reach scontrol.
        return subprocess.run(
            ["scontrol", *arguments], capture_output=True, text=True, timeout=10, check=True, start_new_session=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
