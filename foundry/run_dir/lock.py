"""`.lock` in a directory: a lock file held by the process that trains or runs a sweep there."""

import errno
import fcntl
import logging
import os
import socket
from contextlib import ExitStack
from pathlib import Path

from foundry.run_dir.files import open_regular

LOCK = ".lock"
"""Name of the lock file; it contains the host name of the machine that locked it last."""

_HELD = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_LONGEST_NAME = 1024  # of a machine
_ours = dict[Path, tuple[int, int]]()
"""Directories that this process has locked, with device and inode of their lock files."""
log = logging.getLogger(__name__)


class RunDirectoryLostError(RuntimeError):
    """The directory of a run that trains was deleted, moved, emptied or replaced."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            f"{folder} was deleted, moved or replaced while the run trained. The run ends because nothing can be saved"
            " there. To resume from its last checkpoint, move the directory back and run the same command again"
        )


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
    if (resolved := folder.resolve()) in _ours:
        return False
    file = held.enter_context(open_regular(folder / LOCK, "a"))
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        if error.errno not in _NO_LOCKS:
            raise
        log.warning("%s cannot be locked (%s); make sure that no other process uses it", folder, error.strerror)
    else:
        file.truncate(0)
        file.write(socket.gethostname())  # a lock taken on another machine may not be seen from this one
        file.flush()
    opened = os.fstat(file.fileno())
    _ours[resolved] = (opened.st_dev, opened.st_ino)
    held.callback(_ours.pop, resolved)
    return True


def check_ours(folder: Path) -> None:
    """Check that a directory is still one that this process has locked, before something is written into it.

    Raises:
        RunDirectoryLostError: it is not.
    """
    try:
        found = os.lstat(folder / LOCK)
    except (FileNotFoundError, NotADirectoryError):
        found = None
    if found is None or (found.st_dev, found.st_ino) not in _ours.values():
        raise RunDirectoryLostError(folder)


def is_held(folder: Path) -> bool | None:
    """Return whether a process holds the lock of a directory; None if this machine cannot tell.

    A lock taken on another machine may not be visible here, so its absence proves nothing if that machine locked last.
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
