"""Exception for a run that a signal stops in an orderly way."""

import signal
from pathlib import Path
from typing import Literal

from foundry.core.exit_codes import code_of_signal


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
