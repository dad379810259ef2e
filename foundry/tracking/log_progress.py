"""Progress in foundry.log as plain lines, independent of the progress on the terminal."""

import logging
from io import TextIOBase

from rich.console import Console

from foundry.run_dir.log import log_to_file
from foundry.tracking.console_progress import Progress


class _LogFile(TextIOBase):
    """Text stream that writes each line as a record of foundry.log, at level INFO."""

    def write(self, text: str) -> int:
        """Log the lines of a text."""
        for line in text.splitlines():
            log_to_file(line, logging.INFO, "foundry.progress")
        return len(text)


def log_progress() -> Progress:
    """Return an observer that writes header, logged steps, evaluations and the end of a run to foundry.log."""
    return Progress(console=Console(file=_LogFile(), force_terminal=False, highlight=False))  # type: ignore[arg-type]
