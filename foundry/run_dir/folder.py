"""The directory that a run writes to, and its recovery if it is deleted or moved during the run."""

import logging
import os
import threading
from collections.abc import Callable
from itertools import chain, count
from pathlib import Path

from foundry.run_dir.files import make_folder

log = logging.getLogger(__name__)


class RunFolder:
    """Run directory that is recreated if it disappears, under the same name unless that name has been taken.

    Attributes:
        path: the current run directory.
        times_lost: how many times the directory has been recreated.
        refill: writes the initial files of a run directory into a new one; called with its path.
    """

    def __init__(self, path: Path, *, marker: str) -> None:
        """Remember the identity of an existing directory.

        Args:
            path: the run directory.
            marker: name of a file that is present from the start; if it is missing, the directory has been emptied.
        """
        self.path, self._marker, self.times_lost = path, marker, 0
        self.refill: Callable[[Path], None] = lambda path: None
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._known = self._hold()

    def close(self) -> None:
        """Close the handle to the directory."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def ensure(self) -> Path:
        """Return the run directory, and recreate it if it was deleted, moved or emptied.

        Logs an error each time it recreates the directory. Safe to call from any thread.

        Raises:
            OSError: no directory can be created.
        """
        with self._lock:
            is_same = _identity(self.path) == self._known
            if is_same and os.path.lexists(self.path / self._marker):
                return self.path
            was = self.path
            fresh = was if is_same else next(path for path in _candidates(was) if _is_free(path))
            make_folder(fresh, parents=True)
            self.refill(fresh)
            self.path, self.times_lost = fresh, self.times_lost + 1
            self._known = self._hold()
            log.error(
                "%s was %s while the run trains; the run continues in %s, without what was in there before",
                was,
                "emptied" if is_same else "deleted or moved",
                fresh,
            )
            return fresh

    def _hold(self) -> tuple[int, int] | None:
        """Return the identity of the directory, and keep it open so that its inode number cannot be reused."""
        self.close()
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return _identity(self.path)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def _candidates(path: Path) -> chain[Path]:
    """Yield the path itself, then alternatives next to it."""
    return chain([path], (path.with_name(f"{path.name}.rescued{number or ''}") for number in count()))


def _is_free(path: Path) -> bool:
    """Return whether the path does not exist or is an empty folder."""
    return not os.path.lexists(path) or (path.is_dir() and not path.is_symlink() and not any(path.iterdir()))
