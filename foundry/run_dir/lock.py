"""`.lock` in a directory: held by the process that trains or runs a sweep there, to be looked at by others."""

import errno
import fcntl
import logging
import socket
from contextlib import ExitStack
from pathlib import Path

from foundry.run_dir.files import open_regular

LOCK = ".lock"
"""The file; it holds the name of the machine that locked it last."""

_HELD = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_LONGEST_NAME = 1024  # of a machine
_ours = set[Path]()
log = logging.getLogger(__name__)


def lock(folder: Path, held: ExitStack) -> bool:
    """Make a directory if need be and lock it until `held` is closed or this process ends; whether that could be done.

    By a POSIX lock, which no forked process inherits: those that read data outlive this one by seconds if it is killed.
    Where the file system has no locks, the work continues without one.

    Raises:
        UnsafeFileError: `.lock` is no regular file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve() not in _ours and relock(folder, held)


def relock(folder: Path, held: ExitStack) -> bool:
    """Lock a directory as `hold` does, also one that this process has held and that was deleted and made anew."""
    file = held.enter_context(open_regular(folder / LOCK, "a"))
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        if error.errno not in _NO_LOCKS:
            raise
        log.warning("%s cannot be locked (%s); see to it that no other process works there", folder, error.strerror)
        return True
    file.truncate(0)
    file.write(socket.gethostname())  # a lock taken on another machine may not be seen from this one
    file.flush()
    _ours.add(folder.resolve())
    held.callback(_ours.discard, folder.resolve())
    return True


def is_held(folder: Path) -> bool | None:
    """Whether a process holds a directory; None where this machine cannot know.

    A lock that another machine took may not be seen from here, so its absence says nothing about that machine.
    """
    if folder.resolve() in _ours:  # to look would be to let go: a POSIX lock ends when any handle to the file is closed
        return True
    try:
        with open_regular(folder / LOCK) as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError as error:
                return True if error.errno in _HELD else None
            return False if file.read(_LONGEST_NAME) == socket.gethostname() else None
    except (OSError, ValueError):  # no such file, not ours, or a file system without locks
        return None
