"""Slurm jobs without a waiting process: the sweep was detached, or its process has ended."""

from collections.abc import Iterable
from pathlib import Path

from foundry.launch.job_state import Unreachable
from foundry.launch.settle import settle
from foundry.launch.slurm.end import Submission
from foundry.launch.slurm.queue import cluster_name, query_twice
from foundry.run_dir.status import ENDED, read_status


def settle_unwatched(run_dirs: Iterable[Path]) -> bool:
    """Query Slurm for jobs that may have no waiting process, and update the status.json of those that have ended.

    Nothing changes if the jobs were submitted to another cluster, or if Slurm does not respond.

    Args:
        run_dirs: run directories of the jobs.

    Returns:
        Whether any job has ended.
    """
    unfinished = [run_dir for run_dir in run_dirs if read_status(run_dir).get("state") not in ENDED]
    notes = {run_dir: note for run_dir in unfinished if (note := Submission.load(run_dir)) is not None}
    if not notes:
        return False
    try:
        cluster = cluster_name()
        jobs = {run_dir: note.job_id for run_dir, note in notes.items() if note.cluster == cluster}
        states = query_twice(list(jobs.values()))
    except Unreachable:
        return False
    queued_jobs = {run_dir: states.get(job_id) for run_dir, job_id in jobs.items()}
    ended_jobs = {run_dir: job for run_dir, job in queued_jobs.items() if job is None or job.has_ended}
    for run_dir, job in ended_jobs.items():
        note = notes[run_dir]
        end = None if job is None else job.as_job_state()
        settle(run_dir, note.job_id, end, scheduler="Slurm", last_output=note.last_output())
    return bool(ended_jobs)
