"""How a run ends that a signal asked to end."""

import signal
from pathlib import Path
from typing import Literal


class Stopped(SystemExit):
    """A signal came, the run saved and ends in order; it is neither a failure nor a result.

    It is a SystemExit, so that the exit code holds whoever started the run: Hydra's `run_job` and submitit catch
    `Exception` only, so a sweep ends too instead of continuing with the next job after Ctrl-C, and no traceback is
    printed. The code is the shell's for a process that a signal ended: 130 for Ctrl-C, 143 for SIGTERM, 138 and 140
    for SIGUSR1 and SIGUSR2; apart from finished (0), failed (1) and refused (2). It crosses processes by pickle.

    Attributes:
        signum: what asked.
        step: optimizer steps done.
        checkpoint: where the run resumes from; None where it saves nothing.
        state: what status.json says: `requeued` where a scheduler starts the same job again by itself, else `stopped`.
    """

    def __init__(
        self, signum: signal.Signals, step: int, checkpoint: Path | None, state: Literal["stopped", "requeued"]
    ) -> None:
        super().__init__(signum, step, checkpoint, state)
        self.signum = signum
        self.step = step
        self.checkpoint = checkpoint
        self.state = state
        self.code = 128 + signum

    @property
    def reason(self) -> str:
        """Why, for status.json."""
        return self.signum.name

    def __str__(self) -> str:
        saved = "nothing was saved" if self.checkpoint is None else f"the checkpoint is {self.checkpoint}"
        return f"stopped by {self.signum.name} after step {self.step}; {saved}"
