"""How a Slurm job ended, where the run could not say it itself: from Slurm, and from what `srun` printed."""

import json
import logging
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from foundry.launch.slurm_queue import QueuedJob
from foundry.run_dir.files import open_regular, read_tail, write_atomically
from foundry.run_dir.names import SUBMISSION
from foundry.run_dir.redact import one_line
from foundry.run_dir.status import ENDED, read_status, write_status
from foundry.run_dir.strict_json import DamagedFileError, read_object

_TYPES = {"job_id": str, "error_output": str, "cluster": str}
_JOB_ID = re.compile(r"\d+([_+]\d+)?")
_MOST_BYTES = 2**24
_log = logging.getLogger(__name__)

_LOST = ("NODE_FAIL", "BOOT_FAIL", "COMPLETED", "PREEMPTED")
_ENDED_BY_SLURM = ("CANCELLED", "NODE_FAIL", "PREEMPTED", "TIMEOUT")
_RANK_ENDED = re.compile(r"^srun: error: (?P<node>\S+): tasks? (?P<ranks>\S+): (?P<how>.+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What a run directory remembers of its job.

    Attributes:
        job_id: Slurm's name of it, such as `31` or `32_0` of an array.
        error_output: the file that rank 0 and srun print their errors to.
        cluster: the cluster that knows the job.
    """

    job_id: str
    error_output: str
    cluster: str

    def save(self, run_dir: Path) -> None:
        """Remember it."""
        write_atomically(run_dir / SUBMISSION, json.dumps(asdict(self)) + "\n")

    @classmethod
    def load(cls, run_dir: Path) -> "Submission | None":
        """What the run directory remembers; None where it has not been submitted, or that cannot be read."""
        try:
            content = read_object(run_dir / SUBMISSION, needed=_TYPES)
        except FileNotFoundError:
            return None
        except DamagedFileError as error:
            _log.warning("%s; whether Slurm has the job is not known", one_line(str(error)))
            return None
        return cls(**{name: content[name] for name in _TYPES}) if _JOB_ID.fullmatch(content["job_id"]) else None

    @staticmethod
    def forget(run_dir: Path) -> None:
        """The run directory's job has ended, and another is to come."""
        (run_dir / SUBMISSION).unlink(missing_ok=True)


class ErrorOutput:
    """What srun says of the ranks of this attempt, in a file that earlier attempts have written to as well.

    Args:
        run_dir: of the job, which has just been started.
    """

    def __init__(self, run_dir: Path) -> None:
        submission = Submission.load(run_dir)
        self._path = None if submission is None else Path(submission.error_output)
        self._start = self._path.stat().st_size if self._path is not None and self._path.exists() else 0

    def first_end(self) -> str | None:
        """Which rank ended first, and how: `rank 1 on n2: Killed`; None where none has."""
        if self._path is None or not self._path.exists():
            return None
        with open_regular(self._path, "rb") as file:
            file.seek(self._start)
            text = _RANK_ENDED.search(file.read(_MOST_BYTES).decode(errors="replace"))
        if text is None:
            return None
        hint = " (out of memory?)" if text["how"] == "Killed" else ""
        return f"rank {text['ranks']} on {text['node']}: {text['how']}{hint}"


def settle(run_dir: Path, job_id: str, found: QueuedJob | None) -> None:
    """Make status.json true of a job that has ended.

    Args:
        run_dir: the job's.
        job_id: Slurm's name of it.
        found: what Slurm says of it; None where it does not know it any more.
    """
    status = read_status(run_dir)
    if status.get("state") in ENDED:
        if found is not None and found.state in _ENDED_BY_SLURM and status["state"] == "stopped":
            write_status(run_dir, reason=f"{status.get('reason', '')}; {found}")
        return
    if found is None:
        # Of a task of an array that is cancelled before it starts, the controller keeps nothing.
        why = "was it cancelled while it waited?" if status.get("state") == "queued" else "it left no word"
        write_status(run_dir, state="lost", reason=f"Slurm does not know job {job_id} any more; {why}")
        return
    text = _last_output(run_dir)
    state = "lost" if found.state in _LOST else "stopped" if found.state == "CANCELLED" else "failed"
    write_status(run_dir, state=state, reason=f"{found}{f'; it said last: {text}' if text else ''}")


def _last_output(run_dir: Path) -> str:
    """The last line that a job has printed to its error output, if any."""
    submission = Submission.load(run_dir)
    lines = read_tail(Path(submission.error_output)).splitlines() if submission else []
    return next((line.strip() for line in reversed(lines) if line.strip() and "slurmstepd" not in line), "")
