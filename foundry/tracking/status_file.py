"""The files status.json and result.json: current state and final result of a run."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foundry.core.events import Evaluated, RunEnded, RunStarted, StepLogged
from foundry.run_dir.result import write_result
from foundry.run_dir.status import now, read_status, replace_status
from foundry.tracking.safe_observer import tolerant


class StatusFile:
    """Observer that updates `status.json`, and writes `result.json` at the end.

    Args:
        run_dir: the run directory.
        seconds_between_updates: minimum time between two updates of `status.json` while the run continues.
        clock: monotonic clock in seconds.
    """

    def __init__(
        self,
        *,
        run_dir: Path,
        seconds_between_updates: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir = Path(run_dir)
        self._interval = seconds_between_updates
        self._clock = clock
        self._write_time = float("-inf")
        self._status: dict[str, Any] = {}

    @tolerant
    def on_start(self, event: RunStarted) -> None:
        """Write the state "running"."""
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._status = {
            "state": "running",
            "reason": "",
            "step": event.step,
            "config_hash": event.config_hash,
            "started": now(),
        }
        if restarts := read_status(self._run_dir).get("restarts"):
            self._status["restarts"] = restarts
        self._write(durable=True)

    @tolerant
    def on_step(self, event: StepLogged) -> None:
        """Record the current step, but write it only if the last write is at least the minimum time ago."""
        self._status["step"] = event.step
        if self._clock() - self._write_time >= self._interval:
            self._write()

    @tolerant
    def on_evaluation(self, event: Evaluated) -> None:
        """Record the current step."""
        self._status["step"] = event.step
        self._write()

    def on_end(self, event: RunEnded) -> None:
        """Record the end of the run. `result.json` is written first, so that a finished run always has a result.

        Raises:
            OSError: if the end of a finished run cannot be recorded; the run then has to end again.
        """
        if event.result:
            write_result(self._run_dir, event.result)
            self._end(event)
        else:
            self._try_to_end(event)

    @tolerant
    def _try_to_end(self, event: RunEnded) -> None:
        self._end(event)

    def _end(self, event: RunEnded) -> None:
        step = event.result.get("step", self._status.get("step", 0))
        self._status |= {"state": event.state, "reason": event.reason, "step": step}
        self._write(durable=True)

    def _write(self, *, durable: bool = False) -> None:
        replace_status(self._run_dir, self._status, durable=durable)
        self._write_time = self._clock()
