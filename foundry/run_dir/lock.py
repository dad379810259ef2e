"""`.lock` in a directory: held by the process that trains or runs a sweep there, to be looked at by others."""

import errno
import fcntl
import logging
import os
import socket
from contextlib import ExitStack
from pathlib import Path

from foundry.run_dir.files import open_regular

LOCK = ".lock"
"""The file; it holds the name of the machine that locked it last."""

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
            f"{folder} was deleted, moved or replaced while the run trained. The run ends, since nothing can be saved"
            " there. To resume from its last checkpoint, move the directory back and give the same command again"
        )


def lock(folder: Path, held: ExitStack) -> bool:
    """Make a directory if need be and lock it until `held` is closed or this process ends; whether that could be done.

    By a POSIX lock, which no forked process inherits: those that read data outlive this one by seconds if it is killed.
    Where the file system has no locks, the work continues without one.

    Raises:
        UnsafeFileError: `.lock` is no regular file.
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
        log.warning("%s cannot be locked (%s); see to it that no other process works there", folder, error.strerror)
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
