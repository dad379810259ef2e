"""Ends of Slurm jobs that the jobs could not record themselves; sample lines are from a real srun and controller."""

import pytest

from foundry.launch.settle import settle as settle_job
from foundry.launch.slurm.end import ErrorOutput, Submission
from foundry.launch.slurm.queue import QueuedJob
from foundry.launch.slurm.unwatched import settle_unwatched
from foundry.run_dir.status import read_status, write_status

KILLED = """\
srun: error: n2: task 3: Killed
srun: launch/slurm: _step_signal: Terminating StepId=10.0
slurmstepd-n1: error: *** STEP 10.0 ON n1 CANCELLED AT 2026-11-21T22:54:02 ***
srun: error: n1: tasks 0-2: Exited with exit code 1
"""


def settle(run_dir, job_id, job):
    """Record the end of a job as Slurm's launcher does."""
    note = Submission.load(run_dir)
    last_output = note.last_output() if note else ""
    settle_job(run_dir, job_id, job and job.as_job_state(), scheduler="Slurm", last_output=last_output)


@pytest.fixture
def submitted(tmp_path):
    """A run directory whose job has been submitted, and the path of the job's error output."""
    error_output = tmp_path / "7_0_log.err"
    Submission(job_id="7", error_output=str(error_output), cluster="lab").save(tmp_path)
    return tmp_path, error_output


@pytest.mark.parametrize(
    ("job", "state", "reason"),
    [
        (QueuedJob("TIMEOUT", "TimeLimit"), "failed", "Slurm: TIMEOUT (reason TimeLimit)"),
        (QueuedJob("NODE_FAIL", nodes="n1"), "lost", "Slurm: NODE_FAIL (on n1)"),
        (QueuedJob("CANCELLED"), "stopped", "Slurm: CANCELLED"),
        (None, "lost", "Slurm no longer knows job 7; it recorded no end"),
    ],
)
def test_settle_records_the_state_that_slurm_reports(tmp_path, job, state, reason):
    write_status(tmp_path, state="running", reason="", step=7)
    settle(tmp_path, "7", job)
    status = read_status(tmp_path)
    assert (status["state"], status["reason"], status["step"]) == (state, reason, 7)


def test_settle_appends_the_last_line_of_the_error_output(submitted):
    run_dir, error_output = submitted
    error_output.write_text("out of file handles\nslurmstepd: error: *** JOB 7 ON n1 ***\n\n")
    write_status(run_dir, state="running")
    settle(run_dir, "7", QueuedJob("FAILED", exit_code="1:0"))
    assert read_status(run_dir)["reason"] == "Slurm: FAILED (exit code 1:0); last output: out of file handles"


def test_settle_keeps_the_state_that_the_job_recorded(tmp_path):
    write_status(tmp_path, state="finished", reason="")
    settle(tmp_path, "7", QueuedJob("FAILED", exit_code="1:0"))
    assert read_status(tmp_path)["state"] == "finished"
    for slurm_state, reason in (("FAILED", "SIGTERM"), ("CANCELLED", "SIGTERM; Slurm: CANCELLED")):
        write_status(tmp_path, state="stopped", reason="SIGTERM")
        settle(tmp_path, "7", QueuedJob(slurm_state))
        assert read_status(tmp_path)["reason"] == reason


def test_first_end_is_the_first_failed_rank_of_this_attempt(submitted):
    run_dir, error_output = submitted
    assert ErrorOutput(run_dir).first_end() is None
    error_output.write_text("srun: error: n1: task 0: Terminated\n")
    attempt = ErrorOutput(run_dir)
    assert attempt.first_end() is None
    with error_output.open("a") as file:
        file.write(KILLED)
    assert attempt.first_end() == "rank 3 on n2: Killed (out of memory?)"
    assert ErrorOutput(run_dir / "local").first_end() is None, "which no srun has started"


def test_error_output_that_cannot_be_read_gives_no_first_end(submitted):
    run_dir, error_output = submitted
    attempt = ErrorOutput(run_dir)
    error_output.mkdir()
    assert attempt.first_end() is None


@pytest.fixture
def slurm_says(tmp_path, monkeypatch):
    """A function that puts a fake `scontrol` on PATH, which knows job 7 of a cluster."""
    monkeypatch.setattr("foundry.launch.slurm.queue._SECOND_LOOK_SECONDS", 0.01)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def write(cluster, *states):
        """Write a `scontrol` that answers each query of the job with the next one of the states."""
        count = tmp_path / "count"
        count.write_text("")
        cases = "".join(f"{number}) state={state};;" for number, state in enumerate(states))
        script = f"""#!/bin/sh
        if [ "$2" = config ]; then echo 'ClusterName             = {cluster}'; exit; fi
        case $(wc -l < {count}) in {cases} esac
        echo >> {count}
        echo "JobId=7 JobState=$state Reason=None ExitCode=0:9 NodeList=n1"
        """
        (tmp_path / "scontrol").write_text(script)
        (tmp_path / "scontrol").chmod(0o755)

    return write


@pytest.mark.parametrize(
    ("cluster", "states", "state"),
    [
        ("lab", ("OUT_OF_MEMORY", "OUT_OF_MEMORY"), "failed"),
        ("lab", ("CANCELLED", "PENDING"), "running"),
        ("lab", ("RUNNING",), "running"),
        ("another", ("FAILED", "FAILED"), "running"),
    ],
)
def test_settle_unwatched_needs_two_reports_of_an_end(submitted, slurm_says, cluster, states, state):
    """A job has ended only if Slurm reports its end twice: a job that is queued again appears ended for a moment."""
    run_dir, _ = submitted
    write_status(run_dir, state="running", reason="")
    slurm_says(cluster, *states)
    settle_unwatched([run_dir])
    assert read_status(run_dir)["state"] == state


def test_settle_unwatched_ignores_a_job_that_was_not_submitted(tmp_path):
    write_status(tmp_path, state="queued", reason="")
    assert not settle_unwatched([tmp_path])
    assert read_status(tmp_path)["state"] == "queued"
