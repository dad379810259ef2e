"""Submission of a Slurm job, with the error output of its ranks and of `srun`."""

import json
import logging
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from foundry.run_dir.files import open_regular, read_tail, write_atomically
from foundry.run_dir.names import SUBMISSION
from foundry.run_dir.redact import one_line
from foundry.run_dir.strict_json import DamagedFileError, read_object

_TYPES = {"job_id": str, "error_output": str, "cluster": str}
_JOB_ID = re.compile(r"\d+([_+]\d+)?")
_MOST_BYTES = 2**24
_log = logging.getLogger(__name__)

_RANK_ENDED = re.compile(r"^srun: error: (?P<node>\S+): tasks? (?P<ranks>\S+): (?P<how>.+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Submission:
    """Slurm job of a run directory, saved in `slurm.json`.

    Attributes:
        job_id: job id of Slurm, such as `31`, or `32_0` for a task of an array.
        error_output: file with the error output of rank 0 and srun.
        cluster: name of the cluster that the job was submitted to.
    """

    job_id: str
    error_output: str
    cluster: str

    def save(self, run_dir: Path) -> None:
        """Write the submission to the run directory."""
        write_atomically(run_dir / SUBMISSION, json.dumps(asdict(self)) + "\n")

    @classmethod
    def load(cls, run_dir: Path) -> "Submission | None":
        """Return the submission of a run directory; None if it was not submitted, or the file is invalid."""
        try:
            content = read_object(run_dir / SUBMISSION, required=_TYPES)
        except FileNotFoundError:
            return None
        except DamagedFileError as error:
            _log.warning("%s; the Slurm job of this run is unknown", one_line(str(error)))
            return None
        return cls(**{name: content[name] for name in _TYPES}) if _JOB_ID.fullmatch(content["job_id"]) else None

    def last_output(self) -> str:
        """Return the last line of the error output, except slurmstepd's messages; empty without output."""
        lines = [line.strip() for line in read_tail(Path(self.error_output)).splitlines()]
        return next((line for line in reversed(lines) if line and "slurmstepd" not in line), "")

    @staticmethod
    def forget(run_dir: Path) -> None:
        """Delete the submission of a job that has ended, so that the run directory can be submitted again."""
        (run_dir / SUBMISSION).unlink(missing_ok=True)


class ErrorOutput:
    """srun's error messages about the ranks of this attempt, in a file that contains earlier attempts too.

    Args:
        run_dir: run directory of the job, which has just started.
    """

    def __init__(self, run_dir: Path) -> None:
        submission = Submission.load(run_dir)
        self._path = None if submission is None else Path(submission.error_output)
        self._start = self._path.stat().st_size if self._path is not None and self._path.exists() else 0

    def first_end(self) -> str | None:
        """Return which rank ended first and how, as in `rank 1 on n2: Killed`; None if srun reported no end."""
        if self._path is None:
            return None
        try:
            with open_regular(self._path, "rb") as file:
                file.seek(self._start)
                text = _RANK_ENDED.search(file.read(_MOST_BYTES).decode(errors="replace"))
        except OSError:  # missing, or not readable: the run must still record its own error
            return None
        if text is None:
            return None
        hint = " (out of memory?)" if text["how"] == "Killed" else ""
        return f"rank {text['ranks']} on {text['node']}: {text['how']}{hint}"
