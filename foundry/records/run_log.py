"""`foundry.log` in a run directory."""

import logging
import sys

log = logging.getLogger(__name__)


class RunLog(logging.FileHandler):
    """Appends to a file; that it cannot be written, as on a full disk, is one line on the terminal.

    The answer of `logging` itself is a traceback there for each record.
    """

    _is_said = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Say once what keeps the file from being written; any other error is a mistake in the call, and shown whole.

        What a few kilobytes hold of the unwritten records follows when there is room.
        """
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._is_said:
            self._is_said = True  # first: this line comes here as well
            log.warning("%s: %s (the run goes on; said once)", self.baseFilename, error)
