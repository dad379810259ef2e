"""Ends of jobs on a real Slurm, with the recorded state and reason of each."""

import json
import os
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import SLURM, assert_same_weights

from foundry.tracking.metrics_file import read_metrics

pytestmark = [pytest.mark.slurm, pytest.mark.long]

SMALL = "hydra.launcher.mem_gb=1"  # so that several jobs fit on a node


def resolve_num_tasks(job_id):
    """Return the process ids of a job's tasks, by rank."""
    tasks = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            variables = dict(word.partition(b"=")[::2] for word in (process / "environ").read_bytes().split(b"\0"))
        except OSError:  # the process has ended
            continue
        is_task = Path(os.fsdecode(command[0])).name.startswith("python") and b"submitit.core._submit" in command
        if is_task and variables[b"SLURM_JOB_ID"] == job_id.encode():
            tasks[int(variables[b"SLURM_PROCID"])] = int(process.name)
    return tasks


def test_slurm_time_limit_requeues_and_the_last_limit_stops_the_run(cluster):
    """Real time limits of a minute during training: one job of two ranks may be requeued, another job may not."""
    limit = ["hydra.launcher.timeout_min=1", "hydra.launcher.signal_delay_s=1"]  # signals come up to 30 s early
    own, steps = cluster.own_objective(), ["hparams.max_steps=200", "tracking.mlflow=true"]
    last = [*SLURM, *own, *limit, *steps, "hydra.sweep.dir=last", "hydra.launcher.max_num_timeout=0"]
    cluster.finish(cluster.sweep(*last, "hydra.launcher.detach=true"))
    driver = cluster.sweep(*SLURM, *own, *limit, *steps, "hydra.launcher.tasks_per_node=2")
    cluster.wait(lambda: "job 0: requeued (" in cluster.output and cluster.status(0, "last")[0] == "stopped", 120)
    (cluster.cwd / "slow").unlink()
    cluster.finish(driver)
    assert cluster.status(0) == ("finished", "")
    assert int(cluster.state_in_slurm(0)["Restarts"]) >= 1

    why = "its time limit was reached as often as hydra.launcher.max_num_timeout allows; the same command resumes it"
    assert cluster.status(0, "last") == ("stopped", why)
    state = cluster.state_in_slurm(0, "last")
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("FAILED", "140:0", "0")
    assert cluster.report("last")[1] == 3
    before = json.loads((cluster.cwd / "last/0/status.json").read_text())["step"]
    assert 0 < before < 200
    assert list((cluster.cwd / "last/0/checkpoints").glob("step_*"))
    cluster.finish(cluster.sweep(*last))
    assert cluster.status(0, "last") == ("finished", "")
    assert "UncompletedJobError" not in (cluster.cwd / "last/0/foundry.log").read_text()

    local = ["hydra/launcher=local", "distributed.nproc_per_node=2", "hydra.sweep.dir=local"]
    cluster.finish(cluster.sweep(*own, "hparams.max_steps=200", *local))
    assert_same_weights(cluster.cwd / "s/0", cluster.cwd / "local/0")
    for sweep in ("s", "last"):
        lines = [line["step"] for line in read_metrics(cluster.cwd / sweep / "0") if "loss" in line]
        assert lines == list(range(1, 201))
    assert [status for _, status in cluster.mlflow_runs()] == ["FINISHED"] * 4, "a parent and a child of each sweep"


def test_slurm_job_at_its_time_limit_before_training_is_stopped(cluster):
    driver = cluster.sweep(*SLURM, "hydra.launcher.max_num_timeout=0", "hparams.max_steps=500")
    cluster.wait((cluster.cwd / "s/0/.lock").exists)
    cluster.ask("scancel", "--signal=USR2", cluster.slurm_id(0))
    cluster.finish(driver, code=3)
    status = json.loads((cluster.cwd / "s/0/status.json").read_text())
    assert status["state"] == "stopped"
    assert status["reason"].startswith("its time limit was reached ")
    assert len(status["config_hash"]) == 64
    assert "Traceback" not in (cluster.cwd / "s/0/foundry.log").read_text()


def test_slurm_sweep_names_failed_ranks_and_continues_other_jobs(cluster):
    """Rank 1 of job 0 raises an error, rank 1 of job 1 is killed, job 2 finishes."""
    overrides = ["hydra.launcher.tasks_per_node=2", SMALL, "hparams.max_steps=300", "hparams.seed=1,2,3"]
    driver = cluster.sweep(*SLURM, *cluster.own_objective(), *overrides)
    for job in range(3):
        cluster.wait_for_steps(job, 2)
    (cluster.cwd / "raise0").touch()
    os.kill(resolve_num_tasks(cluster.state_in_slurm(1)["JobId"])[1], 9)
    cluster.wait(lambda: cluster.output.count(": failed (") == 2)
    (cluster.cwd / "slow").unlink()
    cluster.finish(driver, code=1)
    assert cluster.status(0) == ("failed", "rank 1: ArithmeticError: the teacher has no answer")
    assert cluster.status(1) == (
        "failed",
        f"rank 1 on {cluster.state_in_slurm(1)['NodeList']}: Killed (out of memory?)",
    )
    assert cluster.status(2) == ("finished", "")
    assert [cluster.state_in_slurm(job)["JobState"] for job in range(3)] == ["FAILED", "FAILED", "COMPLETED"]
    assert cluster.report()[1] == 1


def test_slurm_jobs_survive_a_node_that_is_down_and_a_drained_node(cluster):
    """Drain one of the two nodes from the start; set the other one down while a job runs on it."""
    cluster.ask("scontrol", "update", "nodename=n2", "state=drain", "reason=upkeep")
    overrides = [*cluster.own_objective(), "hparams.max_steps=30", "hparams.seed=1,2"]
    driver = cluster.sweep(*SLURM, *overrides)
    cluster.wait_for_steps(0, 2)
    cluster.wait(lambda: "job 1 (hparams.seed=2): queued (" in cluster.output)
    cluster.ask("scontrol", "update", "nodename=n1", "state=down", "reason=broken")
    cluster.wait(lambda: "job 0 (hparams.seed=1): requeued (" in cluster.output)
    message, code = cluster.report()
    assert code == 3
    assert "2 jobs: 1 requeued, 1 queued" in message
    (cluster.cwd / "slow").unlink()
    cluster.ask("scontrol", "update", "nodename=n1,n2", "state=resume")
    cluster.finish(driver)
    assert [cluster.status(job) for job in (0, 1)] == [("finished", "")] * 2
    assert [cluster.state_in_slurm(job)["Restarts"] for job in (0, 1)] == ["1", "0"]


@pytest.mark.parametrize("end", ["node", "preemption"])
def test_slurm_job_with_no_requeue_is_stopped(cluster, end):
    no_requeue = "+hydra.launcher.additional_parameters.no-requeue=true"
    overrides = [*cluster.own_objective(), no_requeue, "hydra.launcher.partition=spare", "hparams.max_steps=50"]
    driver = cluster.sweep(*SLURM, *overrides)
    cluster.wait_for_steps(0, 2)
    node = cluster.state_in_slurm(0)["NodeList"]
    if end == "node":
        cluster.ask("scontrol", "update", f"nodename={node}", "state=down", "reason=broken")
    else:
        cluster.ask("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--wrap", "true")
    cluster.finish(driver, code=3)
    state, reason = cluster.status(0)
    assert state == "stopped"
    assert reason.startswith(f"SIGTERM; Slurm: {'NODE_FAIL' if end == 'node' else 'PREEMPTED'} (")
    assert reason.endswith(f"on {node})")
    assert cluster.report()[1] == 3
    assert (cluster.cwd / "s/0/checkpoints/latest").exists()


@pytest.mark.parametrize("may_requeue", [True, False])
def test_job_preempted_by_cancel_requests_its_own_requeue(cluster, may_requeue):
    """The run itself requests the requeue; if Slurm refuses it, the recorded state is stopped."""
    if not may_requeue:
        scontrol = cluster.cwd / "bin" / "scontrol"
        scontrol.parent.mkdir()
        scontrol.write_text('#!/bin/sh\n[ "$1" = requeue ] && exit 1\nexec /usr/bin/scontrol "$@"\n')
        scontrol.chmod(0o755)
        cluster.environment["PATH"] = f"{scontrol.parent}:{cluster.environment['PATH']}"
    overrides = [*cluster.own_objective(), "hydra.launcher.partition=spare", "hparams.max_steps=50"]
    driver = cluster.sweep(*SLURM, *overrides)
    cluster.wait_for_steps(0, 2)
    cluster.ask("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--wrap", "true")
    if may_requeue:
        cluster.wait(lambda: "job 0: requeued (" in cluster.output)
        (cluster.cwd / "slow").unlink()
        cluster.finish(driver)
        assert cluster.status(0) == ("finished", "")
        assert cluster.state_in_slurm(0)["Restarts"] == "1"
    else:
        cluster.finish(driver, code=3)
        state, reason = cluster.status(0)
        assert state == "stopped"
        assert reason.startswith("SIGTERM; Slurm does not queue the job again; Slurm: PREEMPTED (")


@pytest.mark.parametrize("keys", ["c\n", "x\n", "\x03"])
def test_ctrl_c_asks_whether_to_cancel_the_slurm_jobs(cluster, keys):
    """Press Ctrl-C while one job runs and the other is queued."""
    overrides = [
        *cluster.own_objective(),
        "hydra.launcher.array_parallelism=1",
        "hparams.max_steps=50",
        "hparams.seed=1,2",
    ]
    terminal = cluster.sweep_at_terminal(*SLURM, *overrides)
    terminal.wait_for("job 0 (hparams.seed=1): running")
    cluster.wait_for_steps(0, 2, detached=True)
    terminal.type("\x03")
    terminal.wait_for("Cancel the jobs (c), or let them continue without this process (any other key)?")
    terminal.type(keys)
    assert terminal.end() == 130
    if keys == "c\n":
        assert cluster.ask("squeue", "--noheader") == ""
        for job, reason in ((0, "SIGTERM; Slurm: CANCELLED ("), (1, "Slurm: CANCELLED (")):
            state, why = cluster.status(job)
            assert state == "stopped"
            assert why.startswith(reason)
        assert cluster.report()[1] == 3
    else:
        assert f"to cancel them: scancel {cluster.slurm_id(0).partition('_')[0]}\r\n" in terminal.output
        (cluster.cwd / "slow").unlink()
        cluster.wait(lambda: cluster.report()[1] == 0, detached=True)
        assert [cluster.status(job) for job in (0, 1)] == [("finished", "")] * 2


def test_slurm_jobs_continue_if_the_sweep_process_is_killed(cluster):
    overrides = [*SLURM, *cluster.own_objective(), "hydra.launcher.array_parallelism=1", "hparams.seed=1,2"]
    driver = cluster.sweep(*overrides, "hparams.max_steps=30")
    cluster.wait_for_steps(0, 2)
    driver.kill()
    driver.wait()
    message, code = cluster.report()
    assert code == 3
    assert "2 jobs: 1 running, 1 queued" in message
    submitted = [cluster.slurm_id(job) for job in (0, 1)]
    driver = cluster.sweep(*overrides, "hparams.max_steps=30")
    cluster.wait(lambda: f"job 1 (hparams.seed=2) is already in the queue as {submitted[1]}" in cluster.output)
    (cluster.cwd / "slow").unlink()
    cluster.finish(driver)
    assert [cluster.status(job) for job in (0, 1)] == [("finished", "")] * 2
    assert [cluster.slurm_id(job) for job in (0, 1)] == submitted


@contextmanager
def killing_sbatch(cluster):
    """Kill the process of a sweep when Slurm has accepted the jobs, before it can record their ids."""
    sbatch, environment, command = cluster.cwd / "bin" / "sbatch", cluster.environment, shutil.which("sbatch")
    sbatch.parent.mkdir()
    sbatch.write_text(f'#!/bin/sh\n{command} "$@" || exit\ncase "$*" in *.sh) kill -9 $PPID;; esac\n')
    sbatch.chmod(0o755)
    cluster.environment = {**environment, "PATH": f"{sbatch.parent}:{environment['PATH']}"}
    yield
    cluster.environment = environment


def test_slurm_jobs_are_submitted_once_if_the_sweep_process_is_killed_during_sbatch(cluster):
    cluster.ask("scontrol", "update", "nodename=n1,n2", "state=drain", "reason=upkeep")
    overrides = [*SLURM, "hparams.seed=1,2", "hparams.max_steps=3"]
    with killing_sbatch(cluster):
        cluster.finish(cluster.sweep(*overrides), code=-signal.SIGKILL)
    assert not (cluster.cwd / "s/0/slurm.json").exists()
    (array,) = cluster.ask("squeue", "--noheader", "--format=%F").split()
    driver = cluster.sweep(*overrides)
    cluster.wait(lambda: f"job 1 (hparams.seed=2) is already in the queue as {array}_1" in cluster.output)
    assert cluster.ask("squeue", "--noheader", "--format=%F").split() == [array]
    cluster.ask("scontrol", "update", "nodename=n1,n2", "state=resume")
    cluster.finish(driver)
    assert [cluster.status(job) for job in (0, 1)] == [("finished", "")] * 2
    assert [cluster.slurm_id(job) for job in (0, 1)] == [f"{array}_0", f"{array}_1"]


def test_slurm_jobs_that_run_before_the_killed_command_is_repeated_are_watched_by_it(cluster):
    overrides = [*SLURM, *cluster.own_objective(), "hparams.seed=1,2", "hparams.max_steps=30"]
    with killing_sbatch(cluster):
        cluster.finish(cluster.sweep(*overrides), code=-signal.SIGKILL)
    for job in (0, 1):
        cluster.wait_for_steps(job, 2, detached=True)
    assert not (cluster.cwd / "s/0/slurm.json").exists()
    driver = cluster.sweep(*overrides)
    cluster.wait(lambda: cluster.output.count("is already in the queue as") == 2)
    (cluster.cwd / "slow").unlink()
    cluster.finish(driver)
    assert [cluster.status(job) for job in (0, 1)] == [("finished", "")] * 2
    assert [cluster.state_in_slurm(job)["Restarts"] for job in (0, 1)] == ["0", "0"]


def test_report_queries_slurm_about_jobs_of_a_detached_sweep(cluster):
    """One job of a detached sweep finishes, one is canceled in the queue; the report ends the sweep's MLflow run."""
    overrides = [
        "hydra.launcher.array_parallelism=1",
        "hparams.seed=1,2",
        "hparams.max_steps=10",
        "tracking.mlflow=true",
    ]
    cluster.finish(cluster.sweep(*SLURM, *cluster.own_objective(), *overrides, "hydra.launcher.detach=true"))
    cluster.wait_for_steps(0, 2, detached=True)
    cluster.ask("scancel", cluster.slurm_id(1))
    cluster.wait(lambda: cluster.status(0)[0] == "finished", detached=True)
    cluster.wait(lambda: not cluster.ask("squeue", "--noheader"), detached=True)
    assert cluster.status(1) == ("queued", "")
    assert [status for _, status in cluster.mlflow_runs()] == ["FINISHED", "RUNNING"], "the job's and the sweep's"
    message, code = cluster.report()
    assert code == 3
    assert "2 jobs: 1 finished, 1 stopped" in message
    state, reason = cluster.status(1)
    assert state == "stopped"
    assert reason.startswith("Slurm: CANCELLED")
    assert [status for _, status in cluster.mlflow_runs()] == ["FINISHED", "FAILED"]
