"""Lines for the user who watches a sweep."""

import sys
from collections import Counter
from collections.abc import Iterable
from typing import TextIO

from foundry.launch.composed_job import ComposedJob
from foundry.run_dir.redact import printable
from foundry.run_dir.status import read_status


class Ledger:
    """Prints one line for each change of a job's state, with the number of jobs in each state.

    Args:
        stream: output stream; None for standard output.
    """

    def __init__(self, *, stream: TextIO | None = None) -> None:
        self._states = dict[int, tuple[str, str]]()
        self._stream = stream

    def add(self, jobs: Iterable[ComposedJob]) -> None:
        """Count jobs as queued."""
        self._states |= {job.index: ("queued", "") for job in jobs}

    def note(self, job: ComposedJob, state: str, reason: str = "") -> None:
        """Record the current state of a job, and print it if it has changed."""
        if self._states[job.index] == (state, reason):
            return
        self._states[job.index] = (state, reason)
        counts = Counter(state for state, _ in self._states.values())
        summary = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
        say(f"{job}: {state}{f' ({reason})' if reason else ''}; {summary}", self._stream)

    def note_end(self, job: ComposedJob) -> None:
        """Record and print how a job ended, according to its status.json."""
        status = read_status(job.run_dir)
        state = status.get("state", "lost")
        self.note(job, state, "" if state == "finished" else status.get("reason", ""))


def say(line: str, stream: TextIO | None = None) -> None:
    """Print a line for the user who watches the sweep, to standard output or another stream."""
    stream = stream or sys.stdout
    stream.write(f"{printable(line)}\n")
    stream.flush()
