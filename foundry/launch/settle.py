"""Record of the end of a job that could not record its own."""

from pathlib import Path

from foundry.launch.job_state import JobState
from foundry.run_dir.status import ENDED, read_status, write_status


def settle(run_dir: Path, job_id: str, end: JobState | None, *, scheduler: str, last_output: str = "") -> None:
    """Update the status.json of a job that has ended.

    Args:
        run_dir: run directory of the job.
        job_id: the scheduler's id of the job.
        end: how the job ended, as its scheduler sees it; None if the scheduler no longer knows the job.
        scheduler: name of the scheduler for messages, such as Slurm.
        last_output: last line of output of the job, for the reason of a job that recorded none.
    """
    status = read_status(run_dir)
    if status.get("state") in ENDED:
        if end is not None and end.was_forced and status["state"] == "stopped":
            write_status(run_dir, reason=f"{status.get('reason', '')}; {end.detail}")
        return
    if end is None:
        # A scheduler may keep no record of a job that is canceled before it starts.
        explanation = "was it canceled before it started?" if status.get("state") == "queued" else "it recorded no end"
        write_status(run_dir, state="lost", reason=f"{scheduler} no longer knows job {job_id}; {explanation}")
        return
    suffix = f"; last output: {last_output}" if last_output else ""
    write_status(run_dir, state=end.outcome, reason=f"{end.detail}{suffix}")
