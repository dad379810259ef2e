"""Record of jobs that are being submitted to Slurm, so that no job is submitted twice.

It is written before `sbatch` starts, and deleted when the ids of the jobs are in their run directories. If the command
is killed in between, or gets no answer, the next one looks the jobs up in Slurm's queue by the path of their batch
script, which Slurm keeps and which is new for each submission.
"""

import json
import math
import shlex
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from foundry.core.errors import ConfigError, Violation
from foundry.launch.job_state import Unreachable
from foundry.launch.slurm.end import Submission
from foundry.launch.slurm.queue import cluster_name, find_script, is_submitting
from foundry.run_dir.files import write_atomically
from foundry.run_dir.names import OPEN_SUBMISSION
from foundry.run_dir.strict_json import DamagedFileError, Types, read_object

_TYPES: dict[str, Types] = {"script": str, "folder": str, "cluster": str, "run_dirs": list, "stderr_to_stdout": bool}
_TYPES |= {"last_seen": (int, float)}
_ARRIVAL_SECONDS = 60.0
"""Time after which a request is no longer on its way to Slurm; clients of Slurm wait 10 s by default."""


@dataclass(frozen=True, kw_only=True)
class OpenSubmission:
    """Jobs that are being submitted as an array, or one job.

    Attributes:
        script: absolute path of the batch script.
        folder: submitit's folder, with placeholders for job ids.
        cluster: name of the cluster.
        run_dirs: run directories of the jobs, in the order of the array.
        stderr_to_stdout: whether the error output is in the file of standard output.
        last_seen: when `sbatch` was last known to be running, in seconds since the epoch.
    """

    script: str
    folder: str
    cluster: str
    run_dirs: tuple[str, ...]
    stderr_to_stdout: bool
    last_seen: float

    def pickle_path(self, number: int) -> Path:
        """Return the file that submitit calls in a job, until the id of the job is known."""
        return Path(self.script).with_suffix(f".{number}.pkl")

    @property
    def slurm_log(self) -> str:
        """Log of a job with Slurm's own messages; its folder exists before the id of the job is known."""
        return str(Path(self.script).with_name("%A_%a_slurm.log" if len(self.run_dirs) > 1 else "%j_slurm.log"))

    def shell_lines(self) -> list[str]:
        """Return lines of the batch script that prepare submitit's folder of a job, and redirect its output there.

        So a job can start although the command was killed before `complete`.
        """
        errors = "2>&1" if self.stderr_to_stdout else '2>>"$folder/${job}_0_log.err"'
        names = {"%j": "$job", "%A": "${job%_*}", "%t": "0"}  # as in submitit's JobPaths
        folder = [f"folder=${{folder//{tag}/{value}}}" for tag, value in names.items()]
        return [
            "number=${SLURM_ARRAY_TASK_ID:-0} job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}",
            f"job=${{job:-$SLURM_JOB_ID}} folder={shlex.quote(self.folder)}",
            *folder,
            f'mkdir -p "$folder"; mv {shlex.quote(str(Path(self.script).with_suffix("")))}.$number.pkl '
            '"$folder/${job}_submitted.pkl" 2>/dev/null  # no file if the command has moved it, or after a requeue',
            f'exec >>"$folder/${{job}}_0_log.out" {errors}; unset number job folder',
        ]

    def save(self, sweep_dir: Path) -> None:
        """Write the record to the sweep directory."""
        write_atomically(sweep_dir / OPEN_SUBMISSION, json.dumps(asdict(self)) + "\n", durable=True)

    def renew(self, sweep_dir: Path) -> None:
        """Record that `sbatch` was running until now."""
        replace(self, last_seen=time.time()).save(sweep_dir)

    @classmethod
    def load(cls, sweep_dir: Path) -> "OpenSubmission | None":
        """Return the open submission of a sweep; None without one.

        Raises:
            DamagedFileError: the record is damaged.
        """
        try:
            content = read_object(sweep_dir / OPEN_SUBMISSION, required=_TYPES)
        except FileNotFoundError:
            return None
        values = {name: content[name] for name in _TYPES}
        return cls(**values | {"run_dirs": tuple(map(str, content["run_dirs"]))})

    def complete(self, sweep_dir: Path, job_id: str) -> list[Submission]:
        """Give submitit's files their final names, save the submission of each job, and delete the record.

        Args:
            sweep_dir: the sweep directory.
            job_id: Slurm's id of the array or of the only job.

        Returns:
            The submission of each job.
        """
        from submitit.core.utils import JobPaths

        is_array = len(self.run_dirs) > 1
        ids = [f"{job_id}_{number}" if is_array else job_id for number in range(len(self.run_dirs))]
        paths = [JobPaths(self.folder, job_id=job) for job in ids]
        for number, path in enumerate(paths):  # first, because a job that has started waits for its file
            with suppress(FileNotFoundError):  # the job has moved it
                path.move_temporary_file(self.pickle_path(number), "submitted_pickle")
        if Path(self.script).exists():
            JobPaths(self.folder, job_id=job_id).move_temporary_file(self.script, "submission_file")
        outputs = [str(path.stdout if self.stderr_to_stdout else path.stderr) for path in paths]
        submissions = [
            Submission(job_id=job, error_output=output, cluster=self.cluster)
            for job, output in zip(ids, outputs, strict=True)
        ]
        for run_dir, submission in zip(map(Path, self.run_dirs), submissions, strict=True):
            if run_dir.is_dir():  # the user may have deleted it since
                submission.save(run_dir)
        (sweep_dir / OPEN_SUBMISSION).unlink(missing_ok=True)
        return submissions

    def discard(self, sweep_dir: Path) -> None:
        """Delete the files of a submission that Slurm has not accepted."""
        for path in (*map(self.pickle_path, range(len(self.run_dirs))), Path(self.script), sweep_dir / OPEN_SUBMISSION):
            path.unlink(missing_ok=True)


def settle_open_submission(sweep_dir: Path) -> None:
    """Complete the open submission of a sweep, if any, if Slurm has accepted it; otherwise discard it.

    Raises:
        ConfigError: the record of the submission is damaged.
        Unreachable: Slurm does not respond, or may still receive the submission.
    """
    try:
        opened = OpenSubmission.load(sweep_dir)
    except DamagedFileError as error:
        message = f"is {sweep_dir}, whose {OPEN_SUBMISSION} {error.reason}"
        remedy = "cancel the jobs of the sweep if `squeue --me` shows any, and remove the file"
        raise ConfigError(Violation("hydra.sweep.dir", f"{message}; {remedy}")) from None
    if opened is None:
        return
    if opened.cluster == cluster_name():
        script = Path(opened.script)
        if is_submitting(script):
            opened.renew(sweep_dir)
            raise Unreachable(f"sbatch of an earlier command still submits {script}")
        if (job_id := find_script(script)) is not None:
            opened.complete(sweep_dir, job_id)
            return
        seconds = time.time() - opened.last_seen
        if 0 <= seconds < _ARRIVAL_SECONDS:  # negative if the clock was changed since
            wait = math.ceil(_ARRIVAL_SECONDS - seconds)
            raise Unreachable(f"sbatch gave no answer, so its jobs may appear in the queue within {wait} s")
    opened.discard(sweep_dir)
