"""The function that submitit runs as each task of a job."""

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from foundry.config.environment import is_local_submitit
from foundry.core.exit_codes import code_of_signal
from foundry.core.stop_signals import STOP_SIGNALS, ignore
from foundry.launch.slurm.queue import will_restart

_OUT_OF_TIME = "its time limit was reached as often as {} allows; the same command resumes it"
_NOT_REQUEUED = "Slurm does not queue the job again ({}); the same command resumes it"


class NotRequeued(SystemExit):
    """Exit of a job that will not be started again.

    Attributes:
        code: 128 + the number of the signal.
        reason: explanation for status.json.
    """

    code: int

    def __init__(self, signum: int, reason: str) -> None:
        super().__init__(code_of_signal(signum))
        self.reason = reason


class SlurmTask:
    """Task of a job; submitit calls the task again after submitit has requeued the job.

    Args:
        work: executes the run of a run directory, and returns the exit code.
    """

    def __init__(self, work: Callable[[Path], int]) -> None:
        self._work = work

    def __call__(self, run_dir: str) -> None:
        """Execute the run; if it fails, exit with its exit code, so that Slurm recognizes a failed job."""
        if cpus := os.environ.get("SLURM_CPUS_PER_TASK"):
            os.environ.setdefault("OMP_NUM_THREADS", cpus)
        _wrap_signal_handlers()
        if code := self._work(Path(run_dir)):
            sys.exit(code)

    def checkpoint(self, run_dir: str) -> Any:
        """Return the same task for the next attempt: all state is in the run directory."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, run_dir)


def _wrap_signal_handlers() -> None:
    """Wrap submitit's signal handlers so that they exit the process even if the job cannot be requeued.

    The unwrapped handlers raise an exception in that case, and the code that runs at that moment might catch it.
    """
    for signum in (signal.SIGUSR1, signal.SIGUSR2):
        handler = signal.getsignal(signum)
        if callable(handler) and getattr(handler, "__name__", "").startswith("checkpoint_and_"):
            signal.signal(signum, _exiting_handler(handler))


def _exiting_handler(handler: Callable[[int, FrameType | None], Any]) -> Callable[[int, FrameType | None], Any]:
    from submitit.core.utils import UncompletedJobError

    @functools.wraps(handler)
    def handle(signum: int, frame: FrameType | None) -> None:
        handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        ignore()  # Slurm signals each process of a task, and may repeat the signal, also during `scontrol requeue`
        try:
            handler(signum, frame)
        except UncompletedJobError:
            limit = "submitit" if is_local_submitit() else "hydra.launcher.max_num_timeout"
            raise NotRequeued(signum, _OUT_OF_TIME.format(limit)) from None
        except (OSError, subprocess.SubprocessError) as error:
            if will_restart() is False:
                raise NotRequeued(signum, _NOT_REQUEUED.format(error)) from None
            sys.exit(code_of_signal(signum))
        for number, previous in handlers.items():  # on ranks above 0 the handler returns, and the rank continues
            signal.signal(number, previous)

    return handle
