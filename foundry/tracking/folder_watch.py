"""Moves the records of a run to a new folder when its own has been deleted or moved."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from foundry.core.events import Evaluated, Observer, RunEnded, RunStarted, StepLogged
from foundry.run_dir.folder import RunFolder
from foundry.tracking.metrics_file import MetricsFile
from foundry.tracking.plots import Plots
from foundry.tracking.safe_observer import tolerant
from foundry.tracking.status_file import StatusFile

_WRITERS = (MetricsFile, StatusFile, Plots)


class FolderWatch:
    """Gets every event first; where the folder is another, the other observers of files begin in that one.

    Args:
        folder: of the run.
        observers: of the run; replaced in place.
        on_change: called with a new folder.
    """

    def __init__(self, folder: RunFolder, observers: list[Observer], on_change: Callable[[Path], None]) -> None:
        self._folder, self._observers, self._on_change = folder, observers, on_change
        self._seen = folder.times_lost
        self._started: RunStarted | None = None

    def on_start(self, event: RunStarted) -> None:
        """Remember what the run is."""
        self._started = event

    @tolerant
    def on_step(self, event: StepLogged) -> None:
        """See to the folder before anything is written."""
        self._look(event.step)

    @tolerant
    def on_evaluation(self, event: Evaluated) -> None:
        """See to the folder before anything is written."""
        self._look(event.step)

    @tolerant
    def on_end(self, event: RunEnded) -> None:
        """See to the folder before the result is written."""
        self._look(event.result.get("step", 0))

    def _look(self, step: int) -> None:
        path = self._folder.ensure()
        if self._folder.times_lost == self._seen or self._started is None:
            return
        self._seen = self._folder.times_lost
        self._on_change(path)
        started = replace(self._started, run_dir=path, step=step)
        for index, observer in enumerate(self._observers):
            if isinstance(observer, _WRITERS):
                self._observers[index] = fresh = type(observer)(run_dir=path)
                fresh.on_start(started)
