"""Log handlers: `foundry.log` in a run directory, and lines on the terminal."""

import logging
import os
import sys
from io import TextIOWrapper
from itertools import takewhile
from pathlib import Path

from foundry.run_dir.files import open_regular, read_bytes
from foundry.run_dir.redact import printable

log = logging.getLogger(__name__)

NOTICE = 25
"""Log level of progress messages of long operations, which the terminal shows in addition to warnings."""
logging.addLevelName(NOTICE, "NOTICE")


def log_to_file(text: str, level: int = logging.ERROR, name: str = log.name) -> None:
    """Write a text to the log files of this process but not to the terminal, which receives it by other means.

    Args:
        text: message of the record.
        level: level of the record; handlers with a higher threshold skip it.
        name: logger name in the record.
    """
    record = log.makeRecord(name, level, __file__, 0, text, (), None)
    for handler in logging.root.handlers:
        if isinstance(handler, logging.FileHandler) and level >= handler.level:
            handler.handle(record)


def prepend_to_log(path: Path, content: bytes) -> None:
    """Insert text before a log that a handler of this process may have open; the handler appends at the new end.

    Lines with which both begin, as after an interrupted call, are written once.
    """
    own = read_bytes(path) if path.exists() else b""
    lines = zip(content.splitlines(keepends=True), own.splitlines(keepends=True), strict=False)
    common = sum(len(line) for line, other in takewhile(lambda pair: pair[0] == pair[1], lines))
    with open_regular(path, "wb") as file:
        file.write(content + own[common:])


class RunLog(logging.FileHandler):
    """File handler that reports write errors, such as a full disk, in one line on the terminal.

    `logging` itself would print a traceback for each record.
    """

    _is_logged = False

    def format(self, record: logging.LogRecord) -> str:
        """Format a record without secrets and escape sequences."""
        return printable(super().format(record))

    def _open(self) -> TextIOWrapper:
        """Open the log, or the null device if the log cannot be opened, because a bad log file must not end the run."""
        try:
            return open_regular(Path(self.baseFilename), "a")  # type: ignore[return-value]
        except OSError as error:
            log.warning("nothing is written to foundry.log: %s (the run continues)", error)
            return Path(os.devnull).open("a")

    def handleError(self, record: logging.LogRecord) -> None:
        """Log an OSError once; handle any other error, which is a bug in the logging call, as `logging` does.

        Records still in the write buffer, a few kilobytes, are written once there is space again.
        """
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._is_logged:
            self._is_logged = True  # set first, since writing this warning to the log fails as well
            log.warning("%s: %s (the run continues; logged once)", self.baseFilename, error)


class Terminal(logging.StreamHandler):  # type: ignore[type-arg]  # the class of stderr is not known
    """Terminal handler that removes secrets and escape sequences."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record without secrets and escape sequences."""
        return printable(super().format(record))
