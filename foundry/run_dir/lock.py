"""`.lock` in a directory: a lock file held by the process that trains or runs a sweep there."""

import errno
import fcntl
import logging
import socket
from contextlib import ExitStack
from pathlib import Path

from foundry.run_dir.files import open_regular

LOCK = ".lock"
"""Name of the lock file; it contains the host name of the machine that locked it last."""

_HELD = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_LONGEST_NAME = 1024  # characters of a host name
_ours = set[Path]()
log = logging.getLogger(__name__)


def lock(folder: Path, held: ExitStack) -> bool:
    """Create a directory if necessary and lock it until `held` is closed or this process ends.

    Uses a POSIX lock because forked processes do not inherit it: data workers can outlive a killed parent by seconds.
    If the file system does not support locks, the function logs a warning and succeeds without one.

    Returns:
        Whether the directory was locked; False if this or another process holds the lock.

    Raises:
        UnsafeFileError: `.lock` is not a regular file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve() not in _ours and relock(folder, held)


def relock(folder: Path, held: ExitStack) -> bool:
    """Lock a directory like `lock`, even if this process locked it before and it has been deleted and recreated."""
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
    """Return whether a process holds the lock of a directory; None if this machine cannot tell.

    A lock taken on another machine may not be visible here, so its absence proves nothing if that machine locked last.
    """
    if folder.resolve() in _ours:  # do not probe: closing any handle to the file would release our POSIX lock
        return True
    try:
        with open_regular(folder / LOCK) as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError as error:
                return True if error.errno in _HELD else None
            return False if file.read(_LONGEST_NAME) == socket.gethostname() else None
    except (OSError, ValueError):  # file missing or not written by foundry, or no lock support in the file system
        return None
