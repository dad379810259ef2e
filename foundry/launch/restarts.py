"""Starting a run's processes again after one of them has failed."""

import logging
from pathlib import Path

from foundry.launch.local import WorkerFailed
from foundry.run_dir.checkpoints import list_checkpoints, parse_step
from foundry.run_dir.redact import one_line
from foundry.run_dir.status import read_status, write_status

log = logging.getLogger(__name__)
_SAME_EACH_TIME = ("NonFiniteError", "LossSpike", "PersistentSpikeError", "OutOfMemoryError", "RanksDifferError")


class Restarts:
    """Decides whether a run whose process has failed is started again, and writes that down.

    Not after what the run itself would do again: a loss that is not finite, memory that does not suffice, or a failure
    in the same words with no newer checkpoint than at the one before. And not where a signal asked it to stop.

    Args:
        run_dir: of the run.
        limit: how often at most.
    """

    def __init__(self, run_dir: Path, limit: int) -> None:
        self._run_dir, self._limit = run_dir, limit
        self._count = 0
        self._last: tuple[int | None, str] | None = None

    def allow(self, failed: WorkerFailed) -> bool:
        """Whether to start all processes again after this failure."""
        if self._count >= self._limit or failed.was_stopped or failed.kind in _SAME_EACH_TIME:
            return False
        status = read_status(self._run_dir)
        if status.get("state") == "finished":
            return False
        reason = one_line(str(failed))
        step = next(map(parse_step, list_checkpoints(self._run_dir)), None)
        if self._last == (step, reason):
            log.error("%s again, with no newer checkpoint: not started once more", reason)
            return False
        self._last = (step, reason)
        self._count += 1
        start = "from the start" if step is None else f"from the checkpoint of step {step}"
        log.warning("%s; restart %d of %d, %s", reason, self._count, self._limit, start)
        note = f"restart {self._count} of {self._limit} after: {reason}"
        write_status(self._run_dir, state="requeued", reason=note, restarts=[*status.get("restarts", []), reason])
        return True
