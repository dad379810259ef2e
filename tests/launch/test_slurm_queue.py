"""Parsing of the output of Slurm's commands; the sample lines are from a real controller."""

import re

import pytest

from foundry.launch.job_state import Unreachable
from foundry.launch.slurm.queue import (
    QueuedJob,
    Rejected,
    cancel,
    partitions,
    query,
    refusal,
    submit_script,
    will_restart,
)

ARRAY = """\
JobId=31 ArrayJobId=31 ArrayTaskId=2-3,5%256 JobName=foundry JobState=PENDING Reason=Resources NodeList= ExitCode=0:0
JobId=33 ArrayJobId=31 ArrayTaskId=1 JobName=foundry JobState=RUNNING Reason=None NodeList=n2 ExitCode=0:0
JobId=32 ArrayJobId=31 ArrayTaskId=0 JobState=OUT_OF_MEMORY Reason=OutOfMemory NodeList=n1 ExitCode=0:125 X=JobState=NO
"""
GONE = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """A function that puts scripts on PATH in place of Slurm's commands; a command without a script fails."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def write(**scripts):
        for name in ("scontrol", "sacct", "sbatch", "scancel", "srun"):
            script = tmp_path / name
            script.write_text(f"#!/bin/sh\n{scripts.get(name, 'echo disabled >&2; exit 1')}\n")
            script.chmod(0o755)

    return write


def test_query_reads_array_tasks_from_scontrol(commands):
    commands(scontrol=f"cat <<'EOF'\n{ARRAY}EOF")
    jobs = query(["31_0", "31_1", "31_2", "31_3", "31_4", "31_5"])
    assert sorted(jobs) == ["31_0", "31_1", "31_2", "31_3", "31_5"]
    assert jobs["31_1"] == QueuedJob("RUNNING", "", "0:0", "n2")
    assert jobs["31_5"].is_waiting
    assert jobs["31_0"].has_ended
    assert str(jobs["31_0"]) == "Slurm: OUT_OF_MEMORY (exit code 0:125, reason OutOfMemory, on n1)"


def test_query_falls_back_to_sacct_for_forgotten_jobs(commands):
    rows = "31_0|CANCELLED by 1000|None|0:15|n1\\n31_0.batch|CANCELLED||0:15|n1\\n"
    commands(scontrol=GONE, sacct=f"printf '{rows}'")
    assert query(["31_0", "31_1"]) == {"31_0": QueuedJob("CANCELLED", "", "0:15", "n1")}


def test_query_omits_forgotten_jobs_without_accounting(commands):
    commands(scontrol=GONE)
    assert query(["31"]) == {}


def test_query_raises_unreachable_if_the_controller_does_not_respond(commands):
    commands(scontrol="echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1")
    with pytest.raises(Unreachable, match="Unable to contact"):
        query(["31"])


def test_query_reads_lists_of_tasks_with_steps_and_without_abbreviation(commands):
    line = "JobId=31 ArrayJobId=31 ArrayTaskId={}%4 JobState=PENDING Reason=None"
    commands(scontrol=f'test "$SLURM_BITSTR_LEN" = 0 && echo "{line.format("1-7:3,9,12-13")}"')
    assert list(query([f"31_{task}" for task in range(14)])) == [f"31_{task}" for task in (1, 4, 7, 9, 12, 13)]


def test_cancel_raises_unreachable_unless_all_jobs_are_canceled_or_have_ended(commands, tmp_path):
    log = tmp_path / "log"
    commands(
        scancel=f"echo $@ >> {log}; echo 'scancel: error: Kill job error on job id 31: Invalid job id' >&2; exit 1"
    )
    cancel(["31", "32_0"])
    cancel(["31"], kill=True)
    assert log.read_text() == "31 32_0\n--signal=KILL --full 31\n"
    commands(scancel="echo 'scancel: error: Unable to contact slurm controller (connect failure)' >&2; exit 1")
    with pytest.raises(Unreachable, match="Unable to contact"):
        cancel(["31"])


def test_partitions_have_time_limits_in_minutes(commands):
    lines = "PartitionName=a Default=NO MaxTime=1-02:30:00\\nPartitionName=b Default=YES MaxTime=UNLIMITED\\n"
    commands(scontrol=f"printf '{lines}'")
    assert partitions() == ({"a": 1590.0, "b": float("inf")}, "b")


def test_refusal_is_none_for_jobs_that_slurm_would_queue(commands, tmp_path):
    """`sbatch --test-only` also refuses jobs that wait for drained nodes; `refusal` then submits and cancels a job."""
    log = tmp_path / "log"
    test_only = "case $1 in --test-only) exit {};; esac"
    commands(sbatch=test_only.format(0))
    assert refusal("#!/bin/sh") is None
    commands(sbatch=f"{test_only.format(1)}; cat >> {log}; echo '31;lab'", scancel=f"echo $1 >> {log}")
    assert refusal("#!/bin/sh\n") is None
    assert log.read_text() == "#!/bin/sh\n31\n"
    message = "sbatch: error: Memory cannot be had\\nsbatch: error: Batch job submission failed\\n"
    commands(sbatch=f"printf '{message}' >&2; exit 1", scancel="exit 3")
    assert refusal("#!/bin/sh") == "Memory cannot be had; Batch job submission failed"


def test_will_restart_detects_a_requested_requeue(commands, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "31")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    commands(scontrol="echo 'JobId=31 JobState=COMPLETING Requeue=1 Restarts=1'")
    assert will_restart()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert will_restart() is False
    commands()
    assert will_restart() is None, "Slurm does not answer"
    monkeypatch.delenv("SLURM_JOB_ID")
    assert will_restart() is None, "of no job"


@pytest.mark.parametrize(
    ("text", "error"), [("Unable to contact slurm controller (connect failure)", Unreachable), ("No", Rejected)]
)
def test_submission_distinguishes_an_outage_from_a_rejection(commands, tmp_path, text, error):
    commands(sbatch=f"echo 'sbatch: error: Batch job submission failed: {text}' >&2; exit 1")
    (script := tmp_path / "job.sh").touch()
    with pytest.raises(error, match=re.escape(text)):
        submit_script(script)


@pytest.mark.parametrize("script", ["kill -9 $$", "exit 3"])
def test_sbatch_that_ends_without_a_reason_may_have_submitted(commands, tmp_path, script):
    commands(sbatch=script)
    (path := tmp_path / "job.sh").touch()
    with pytest.raises(Unreachable, match="sbatch ended with exit code"):
        submit_script(path)


def test_check_of_a_script_distinguishes_an_outage_from_a_rejection(commands):
    commands(sbatch="echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1")
    with pytest.raises(Unreachable, match="Socket timed out on send/recv operation"):
        refusal("#!/bin/sh")
