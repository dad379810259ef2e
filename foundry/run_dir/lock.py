"""`.lock` in a directory: a lock file held by the process that trains or runs a sweep in the directory."""

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
_LONGEST_NAME = 1024  # characters of a host name
_locked_folders = dict[Path, tuple[int, int]]()
"""Directories that this process has locked, with device and inode of their lock files."""
log = logging.getLogger(__name__)


class RunDirectoryLostError(RuntimeError):
    """The directory of a run that trains was deleted, moved, emptied or replaced."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            f"{folder} was deleted, moved or replaced while the run trained. The run ends because nothing can be saved"
            " there. To resume from its last checkpoint, move the directory back and run the same command again"
        )


def lock(folder: Path, stack: ExitStack) -> bool:
    """Create a directory if necessary and lock it until `stack` is closed or this process ends.

    Uses a POSIX lock because forked processes do not inherit it: data workers can outlive a killed parent by seconds.
    If the file system does not support locks, the function logs a warning and succeeds without a lock.

    Returns:
        Whether the directory was locked; False if this or another process holds the lock.

    Raises:
        UnsafeFileError: `.lock` is not a regular file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (resolved := folder.resolve()) in _locked_folders:
        return False
    file = stack.enter_context(open_regular(folder / LOCK, "a"))
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
        file.write(socket.gethostname())  # for `is_held`: locks of other machines may not be visible
        file.flush()
    lock_stat = os.fstat(file.fileno())
    _locked_folders[resolved] = (lock_stat.st_dev, lock_stat.st_ino)
    stack.callback(_locked_folders.pop, resolved)
    return True


def check_locked(folder: Path) -> None:
    """Check that a directory is still one that this process has locked, before something is written into it.

    Raises:
        RunDirectoryLostError: the directory, or the lock file that this process has locked, is no longer there.
    """
    try:
        lock_stat = os.lstat(folder / LOCK)
    except (FileNotFoundError, NotADirectoryError):
        lock_stat = None
    if lock_stat is None or (lock_stat.st_dev, lock_stat.st_ino) not in _locked_folders.values():
        raise RunDirectoryLostError(folder)


def is_held(folder: Path) -> bool | None:
    """Return whether a process holds the lock of a directory; None if this machine cannot tell.

    A lock taken on another machine may not be visible here. Therefore a lock that seems free proves nothing if another
    machine locked the directory last.
    """
    # Do not open the lock file: closing any handle to it would release this process's POSIX lock.
    if folder.resolve() in _locked_folders:
        return True
    try:
        with open_regular(folder / LOCK) as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError as error:
                return True if error.errno in _HELD else None
            return False if file.read(_LONGEST_NAME) == socket.gethostname() else None
    except (OSError, ValueError):  # the lock file is missing, unreadable, or not one of foundry
        return None
