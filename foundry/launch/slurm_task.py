"""What submitit runs as each task of a Slurm job."""

import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any


class OutOfTime(SystemExit):
    """submitit would not put the job into the queue once more."""

    code: int


class SlurmTask:
    """A task of a job; submitit calls it again when it has put the job back into the queue.

    Args:
        work: runs what a run directory holds, and returns its exit code.
    """

    def __init__(self, work: Callable[[Path], int]) -> None:
        self._work = work

    def __call__(self, run_dir: str) -> None:
        """Work, and leave with the run's exit code, by which Slurm tells a job that failed."""
        if cpus := os.environ.get("SLURM_CPUS_PER_TASK"):
            os.environ.setdefault("OMP_NUM_THREADS", cpus)
        _end_when_out_of_time()
        if code := self._work(Path(run_dir)):
            sys.exit(code)

    def checkpoint(self, run_dir: str) -> Any:
        """The same again: all state is in the run directory."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, run_dir)


def _end_when_out_of_time() -> None:
    """Have submitit's handler leave when it has no attempts left; it raises an error, which any code here may catch."""
    for signum in (signal.SIGUSR1, signal.SIGUSR2):
        handler = signal.getsignal(signum)
        if callable(handler) and getattr(handler, "__name__", "").startswith("checkpoint_and_"):
            signal.signal(signum, _leaving(handler))


def _leaving(handler: Callable[[int, FrameType | None], Any]) -> Callable[[int, FrameType | None], Any]:
    from submitit.core.utils import UncompletedJobError

    @functools.wraps(handler)
    def handle(signum: int, frame: FrameType | None) -> None:
        try:
            handler(signum, frame)
        except UncompletedJobError:
            raise OutOfTime(128 + signum) from None

    return handle
