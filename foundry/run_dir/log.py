"""What is logged: `foundry.log` in a run directory, and lines on the terminal."""

import logging
import os
import sys
from io import TextIOWrapper
from pathlib import Path

from foundry.run_dir.files import open_regular
from foundry.run_dir.redact import printable

log = logging.getLogger(__name__)

NOTICE = 25
"""The level of what the terminal shows besides warnings: how far something that takes long has got."""
logging.addLevelName(NOTICE, "NOTICE")


def log_to_file(text: str, level: int = logging.ERROR, name: str = log.name) -> None:
    """Write into the files that this process logs to a text that the terminal gets by other means.

    Args:
        text: of the record.
        level: of the record; handlers that leave it out do.
        name: of the logger that the record names.
    """
    record = log.makeRecord(name, level, __file__, 0, text, (), None)
    for handler in logging.root.handlers:
        if isinstance(handler, logging.FileHandler) and level >= handler.level:
            handler.handle(record)


class RunLog(logging.FileHandler):
    """Appends to a file; that it cannot be written, as on a full disk, is one line on the terminal.

    The answer of `logging` itself is a traceback there for each record.
    """

    _is_logged = False

    def format(self, record: logging.LogRecord) -> str:
        """The line, without secrets and escape sequences."""
        return printable(super().format(record))

    def _open(self) -> TextIOWrapper:
        """Open a regular file, or nothing: a run does not end because its log is something else."""
        try:
            return open_regular(Path(self.baseFilename), "a")  # type: ignore[return-value]
        except OSError as error:
            log.warning("nothing is written to foundry.log: %s (the run continues)", error)
            return Path(os.devnull).open("a")

    def handleError(self, record: logging.LogRecord) -> None:
        """Say once what keeps the file from being written; any other error is an error in the call, and shown whole.

        What a few kilobytes hold of the unwritten records follows when there is room.
        """
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._is_logged:
            self._is_logged = True  # first: this line comes here as well
            log.warning("%s: %s (the run continues; logged once)", self.baseFilename, error)


class Terminal(logging.StreamHandler):  # type: ignore[type-arg]  # of whatever stderr is
    """Lines on the terminal, without secrets and escape sequences."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        return printable(super().format(record))
