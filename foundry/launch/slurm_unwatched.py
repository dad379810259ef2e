"""Jobs of Slurm that nobody waits for: a sweep that was detached, or whose process is gone."""

import time
from collections.abc import Iterable
from pathlib import Path

from foundry.launch.slurm_end import Submission, settle
from foundry.launch.slurm_queue import QueuedJob, Unreachable, cluster_name, query
from foundry.run_dir.status import ENDED, read_status

_SECOND_LOOK_SECONDS = 2.0


def settle_unwatched(run_dirs: Iterable[Path]) -> bool:
    """Ask Slurm about jobs that nobody may be waiting for, and make status.json true of those that have ended.

    Nothing is changed where this machine's Slurm is not the one that the jobs were submitted to, or does not answer.

    Args:
        run_dirs: those of the jobs.

    Returns:
        Whether any may have ended.
    """
    going = [run_dir for run_dir in run_dirs if read_status(run_dir).get("state") not in ENDED]
    notes = {run_dir: note for run_dir in going if (note := Submission.load(run_dir)) is not None}
    if not notes:
        return False
    try:
        here = cluster_name()
        jobs = {run_dir: note.job_id for run_dir, note in notes.items() if note.cluster == here}
        suspects = _ended(jobs)
        if not suspects:
            return False
        time.sleep(_SECOND_LOOK_SECONDS)  # one that Slurm is about to put into the queue again has ended for a moment
        ended = {run_dir: found for run_dir, found in _ended(jobs).items() if run_dir in suspects}
    except Unreachable:
        return False
    for run_dir, found in ended.items():
        settle(run_dir, jobs[run_dir], found)
    return True


def _ended(jobs: dict[Path, str]) -> dict[Path, QueuedJob | None]:
    """Those that will not run any more, with what Slurm says of them."""
    known = query(list(jobs.values()))
    found = {run_dir: known.get(job_id) for run_dir, job_id in jobs.items()}
    return {run_dir: job for run_dir, job in found.items() if job is None or job.has_ended}
