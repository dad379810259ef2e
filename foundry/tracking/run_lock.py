"""`.lock` in a run directory: held by the process that trains there, to be looked at by others."""

import errno
import fcntl
import socket
from pathlib import Path

LOCK = ".lock"
"""The file; it holds the name of the machine that locked it last."""


def is_held(run_dir: Path) -> bool | None:
    """Whether a process trains in a run directory; None where this machine cannot know.

    A lock that another machine took may not be seen from here, so its absence says nothing about that machine.
    Not for the process that holds the lock: POSIX locks end when any file handle to them is closed.
    """
    try:
        with (run_dir / LOCK).open() as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError as error:
                return True if error.errno in (errno.EACCES, errno.EAGAIN) else None
            return False if file.read() == socket.gethostname() else None
    except OSError:  # no such file, or a file system without locks
        return None
