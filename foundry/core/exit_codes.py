"""The table of exit codes: its numbers are a contract with schedulers, which decide by them whether to start again.

The page docs/commands.md has the same table. Imports no torch.
"""

import signal
from enum import IntEnum, StrEnum
from typing import Self

_SIGNALS, _LAST_SIGNAL = 128, 64


class Retry(StrEnum):
    """Outcome of the same command if it is started again."""

    never = "never"
    """It ends the same way at once: nothing is left to do, or the command itself must be changed."""

    useless = "useless"
    """It probably fails again, because the cause is in the run and not in the machine."""

    yes = "yes"
    """It may succeed, and resumes from the last checkpoint."""

    continues = "continues"
    """It resumes where the run was saved; the attempt was no failure and does not count as one."""


class ExitCode(IntEnum):
    """Exit codes of foundry's processes.

    Codes of signals are 128 + the number of the signal, as in a shell, and have the value of the platform.

    Attributes:
        retry: whether to start the same command again.
        meaning: one line, as in the table of the documentation.
    """

    retry: Retry
    meaning: str

    def __new__(cls, value: int, retry: Retry, meaning: str) -> Self:
        """Return the member with its attributes."""
        member = int.__new__(cls, value)
        member._value_, member.retry, member.meaning = value, retry, meaning
        return member

    SUCCESS = 0, Retry.never, "the command has done its work"
    FAILED = 1, Retry.useless, "the run, the job or the command failed"
    REFUSED = 2, Retry.never, "an error in the arguments, or in a file that they name"
    UNFINISHED = 3, Retry.yes, "a sweep, or `report`: no job has failed, but some have not finished"
    STALLED = 74, Retry.yes, "a rank made no progress, or waited too long for another rank"
    RANK_LOST = 75, Retry.yes, "a rank, or its machine, was lost"
    SIGHUP = _SIGNALS + signal.SIGHUP, Retry.continues, "stopped by SIGHUP"
    SIGINT = _SIGNALS + signal.SIGINT, Retry.continues, "stopped by SIGINT, as by Ctrl-C"
    SIGKILL = _SIGNALS + signal.SIGKILL, Retry.yes, "killed, for example because memory ran out"
    SIGUSR1 = _SIGNALS + signal.SIGUSR1, Retry.continues, "stopped by SIGUSR1"
    SIGUSR2 = _SIGNALS + signal.SIGUSR2, Retry.continues, "stopped by SIGUSR2, as at Slurm's time limit"
    SIGPIPE = _SIGNALS + signal.SIGPIPE, Retry.yes, "the program that reads the output, such as `head`, has exited"
    SIGTERM = _SIGNALS + signal.SIGTERM, Retry.continues, "stopped by SIGTERM, as at preemption"


def code_of_signal(signum: int) -> int:
    """Return the exit code of a process that a signal ended, as a shell reports it."""
    return _SIGNALS + signum


def retry(code: int) -> Retry:
    """Return whether to start a command again that ended with an exit code.

    Args:
        code: the exit code; negative for a signal that ended the process, as in `subprocess`.

    Returns:
        The class of the code in `ExitCode`. Any other signal, such as SIGSEGV, counts as a lost process (`yes`), any
        other code as a failure (`useless`).
    """
    code = code_of_signal(-code) if code < 0 else code
    for member in ExitCode:
        if member == code:
            return member.retry
    return Retry.yes if _SIGNALS < code <= _SIGNALS + _LAST_SIGNAL else Retry.useless


def codes(*classes: Retry) -> list[int]:
    """Return the exit codes of some classes in ascending order, for the rules of a scheduler."""
    return sorted(int(code) for code in ExitCode if code.retry in classes)
