"""What Slurm's commands say, read; the lines are a real controller's."""

import pytest

from foundry.launch.slurm_queue import QueuedJob, Unreachable, partitions, query, refusal, will_restart

ARRAY = """\
JobId=31 ArrayJobId=31 ArrayTaskId=2-3,5%256 JobName=foundry JobState=PENDING Reason=Resources NodeList= ExitCode=0:0
JobId=33 ArrayJobId=31 ArrayTaskId=1 JobName=foundry JobState=RUNNING Reason=None NodeList=n2 ExitCode=0:0
JobId=32 ArrayJobId=31 ArrayTaskId=0 JobState=OUT_OF_MEMORY Reason=OutOfMemory NodeList=n1 ExitCode=0:125 X=JobState=NO
"""
GONE = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Puts commands of given scripts where Slurm's would be; there are no others of Slurm's."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def write(**scripts):
        for name in ("scontrol", "sacct", "sbatch", "scancel"):
            script = tmp_path / name
            script.write_text(f"#!/bin/sh\n{scripts.get(name, 'echo disabled >&2; exit 1')}\n")
            script.chmod(0o755)

    return write


def test_an_array_is_read_from_the_controller(commands):
    commands(scontrol=f"cat <<'EOF'\n{ARRAY}EOF")
    found = query(["31_0", "31_1", "31_2", "31_3", "31_4", "31_5"])
    assert sorted(found) == ["31_0", "31_1", "31_2", "31_3", "31_5"]
    assert found["31_1"] == QueuedJob("RUNNING", "", "0:0", "n2")
    assert found["31_5"].is_waiting
    assert found["31_0"].has_ended
    assert str(found["31_0"]) == "Slurm: OUT_OF_MEMORY (exit code 0:125, reason OutOfMemory, on n1)"


def test_what_the_controller_has_forgotten_is_asked_of_the_accounting(commands):
    rows = "31_0|CANCELLED by 1000|None|0:15|n1\\n31_0.batch|CANCELLED||0:15|n1\\n"
    commands(scontrol=GONE, sacct=f"printf '{rows}'")
    assert query(["31_0", "31_1"]) == {"31_0": QueuedJob("CANCELLED", "", "0:15", "n1")}


def test_without_accounting_a_forgotten_job_is_unknown(commands):
    commands(scontrol=GONE)
    assert query(["31"]) == {}


def test_a_controller_that_does_not_answer_says_nothing_of_the_jobs(commands):
    commands(scontrol="echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1")
    with pytest.raises(Unreachable, match="Unable to contact"):
        query(["31"])


def test_time_limits_of_partitions_are_minutes(commands):
    lines = "PartitionName=a Default=NO MaxTime=1-02:30:00\\nPartitionName=b Default=YES MaxTime=UNLIMITED\\n"
    commands(scontrol=f"printf '{lines}'")
    assert partitions() == ({"a": 1590.0, "b": float("inf")}, "b")


def test_a_script_is_refused_only_if_slurm_would_not_let_it_wait(commands, tmp_path):
    """`sbatch --test-only` refuses what has to wait for drained nodes; a real submission that is cancelled tells."""
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


def test_a_requeue_that_was_ordered_counts_as_a_restart(commands, monkeypatch):
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
