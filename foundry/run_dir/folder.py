"""The folder that a run writes into, and what becomes of that when somebody deletes or moves it meanwhile."""

import logging
import os
import threading
from collections.abc import Callable
from itertools import chain, count
from pathlib import Path

from foundry.run_dir.files import make_folder

log = logging.getLogger(__name__)


class RunFolder:
    """Notices that a run directory is gone, and makes another: by the same name where nothing else has taken it.

    Attributes:
        path: where the run writes now.
        times_lost: how often it had to be made anew.
        refill: writes into a new folder what every run directory has; called with its path.
    """

    def __init__(self, path: Path, *, marker: str) -> None:
        """Take note of a folder.

        Args:
            path: the run directory.
            marker: a file that it has from the start; without it somebody has emptied it.
        """
        self.path, self._marker, self.times_lost = path, marker, 0
        self.refill: Callable[[Path], None] = lambda path: None
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._known = self._hold()

    def close(self) -> None:
        """Let go of it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def ensure(self) -> Path:
        """The folder, made anew if it is not the one it was; logged once each time. Any thread may ask.

        Raises:
            OSError: there is nowhere to write.
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
        """Identify the folder, and keep it open: the number of one that is deleted would be given to another."""
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
    """The path itself, then others next to it."""
    return chain([path], (path.with_name(f"{path.name}.rescued{number or ''}") for number in count()))


def _is_free(path: Path) -> bool:
    """Whether nobody else has anything there."""
    return not os.path.lexists(path) or (path.is_dir() and not path.is_symlink() and not any(path.iterdir()))
