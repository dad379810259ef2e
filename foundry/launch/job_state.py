"""State of a submitted job, as its launcher sees it."""

from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """Phase of a submitted job."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class JobState:
    """State of a submitted job in its launcher; the run's own state is in its status.json.

    Attributes:
        phase: whether the job waits, runs or has ended.
        detail: nodes of a running job, reason of a waiting job, or how a job ended, as in `killed by SIGKILL`.
        outcome: state to record in status.json if an ended job recorded none: failed, lost or stopped.
        was_forced: whether a scheduler ended the job; `detail` is then added to the reason of a job that stopped.
    """

    phase: Phase
    detail: str = ""
    outcome: str = "failed"
    was_forced: bool = False


class Unreachable(Exception):
    """The scheduler or the machine of the jobs does not respond, so the states of the jobs are unknown."""
