"""Restart of a run's processes after one of them has failed."""

import logging
from pathlib import Path

from foundry.launch.local import WorkerFailed
from foundry.run_dir.checkpoints import list_checkpoints, parse_step
from foundry.run_dir.redact import one_line
from foundry.run_dir.status import read_status, write_status

log = logging.getLogger(__name__)
_REPEATING_ERRORS = ("NonFiniteError", "LossSpike", "PersistentSpikeError", "OutOfMemoryError", "RanksDifferError")


class Restarts:
    """Decides whether a failed run is restarted, and records the restart.

    A run is not restarted if the failure would repeat, such as a non-finite loss, a loss spike or insufficient memory,
    or if the last failure had the same message and there is no newer checkpoint. A run that has finished, or that a
    signal asked to stop, is not restarted either.

    Args:
        run_dir: the run directory.
        limit: maximum number of restarts.
    """

    def __init__(self, run_dir: Path, limit: int) -> None:
        self._run_dir, self._limit = run_dir, limit
        self._count = 0
        self._last_failure: tuple[int | None, str] | None = None

    def allow(self, failed: WorkerFailed) -> bool:
        """Return whether to restart all processes after this failure."""
        if self._count >= self._limit or failed.was_stopped or failed.kind in _REPEATING_ERRORS:
            return False
        status = read_status(self._run_dir)
        if status.get("state") == "finished":
            return False
        reason = one_line(str(failed))
        step = next(map(parse_step, list_checkpoints(self._run_dir)), None)
        if self._last_failure == (step, reason):
            log.error("%s again, without a newer checkpoint: the run is not restarted", reason)
            return False
        self._last_failure = (step, reason)
        self._count += 1
        start = "from the start" if step is None else f"from the checkpoint of step {step}"
        log.warning("%s; restart %d of %d, %s", reason, self._count, self._limit, start)
        note = f"restart {self._count} of {self._limit} after: {reason}"
        write_status(self._run_dir, state="requeued", reason=note, restarts=[*status.get("restarts", []), reason])
        return True
