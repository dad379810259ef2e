"""Sweeps on a real Slurm: jobs run as submitted, through requeues and preemption, and their states are reported."""

import json

import pytest
from cluster import SLURM, assert_same_weights
from omegaconf import OmegaConf

from foundry.config.schemas.launcher import Slurm
from foundry.core.errors import ConfigError
from foundry.launch.slurm.submission import check_script
from foundry.tracking.metrics_file import read_metrics

pytestmark = pytest.mark.slurm


def steps(run_dir):
    return [line["step"] for line in read_metrics(run_dir) if "loss" in line]


@pytest.mark.long
def test_slurm_sweep_with_invalid_launcher_settings_submits_nothing(cluster):
    before = cluster.next_job_id()
    for wrong, message in (
        (["hydra.launcher.signal_delay_s=300"], "hydra.launcher.signal_delay_s: is 300 but the time limit of 5 min"),
        (
            ["hydra.launcher.partition=gpus"],
            "partition: is gpus, which is not a partition here; available partitions: ",
        ),
    ):
        cluster.finish(cluster.sweep(*SLURM, *wrong, "hparams.lr=1e-3,2e-3"), code=2)
        assert message in cluster.output
    assert not (cluster.cwd / "s").exists()
    assert cluster.next_job_id() == before + 1


@pytest.mark.long
def test_job_that_slurm_refuses_is_reported_and_leaves_no_files(cluster):
    """Check also with all nodes drained; drained nodes alone are not a reason to refuse a job."""
    for state in ("resume", "drain"):
        cluster.ask("scontrol", "update", "nodename=n1,n2", f"state={state}", "reason=upkeep")
        cluster.finish(cluster.sweep(*SLURM, "hydra.launcher.mem_gb=100"), code=2)
        assert "hydra.launcher: Slurm rejects the jobs: Memory specification can not be satisfied" in cluster.output
    assert not (cluster.cwd / "s").exists()
    assert cluster.ask("squeue", "--noheader") == ""


@pytest.mark.long
def test_array_beyond_the_limit_of_the_cluster_is_refused_with_a_remedy(cluster, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    settings = Slurm(submitit_folder=str(cluster.cwd / "%j"), name="large", timeout_min=5)
    check_script(settings, 1000)
    with pytest.raises(ConfigError, match=r"\(MaxArraySize\): lower hydra.sweeper.max_batch_size"):
        check_script(settings, 2000)


@pytest.mark.long
def test_slurm_jobs_run_as_submitted_and_each_end_is_recorded(cluster):
    """Of four jobs, one finishes, one is killed while it runs, one fails, and one is canceled in the queue."""
    options = cluster.cwd / "own" / "experiment"
    options.mkdir(parents=True)
    yaml = "# @package _global_\nhparams:\n  lr: 0.003\n"
    (options / "mine.yaml").write_text(yaml)
    for name in ("gone", "here"):
        (cluster.cwd / f"{name}.jsonl").write_text('{"text": "a few words to learn from"}\n' * 500)
    cluster.ask("scontrol", "update", "nodename=n1,n2", "state=drain", "reason=upkeep")
    driver = cluster.sweep(
        *[*SLURM, "--config-dir=own", "experiment=mine", "data=text", "data.seq_len=16"],
        "data.path=here.jsonl,gone.jsonl",
        "hparams.max_steps=3,1000000",
    )
    cluster.wait(lambda: "4 jobs in the queue" in cluster.output and cluster.output.count(": queued (") >= 4)
    (options / "mine.yaml").write_text(yaml.replace("0.003", "9.9"))
    (cluster.cwd / "gone.jsonl").unlink()
    cluster.ask("scancel", cluster.slurm_id(3))
    cluster.wait(lambda: "job 3 (data.path=gone.jsonl hparams.max_steps=1000000): lost" in cluster.output)
    cluster.ask("scontrol", "update", "nodename=n1,n2", "state=resume")
    cluster.wait(lambda: cluster.state_in_slurm(1)["JobState"] == "RUNNING")
    cluster.kill(1)
    cluster.finish(driver, code=1)

    assert cluster.status(0) == ("finished", "")
    assert json.loads((cluster.cwd / "s/0/metrics.jsonl").read_text().splitlines()[0])["lr"] < 0.0031
    assert OmegaConf.load(cluster.cwd / "s/0/config.yaml").hparams.lr == 0.003
    state, reason = cluster.status(1)
    assert state == "stopped"
    assert reason.startswith("Slurm: CANCELLED (")
    state, reason = cluster.status(2)
    assert state == "failed"
    assert "gone.jsonl" in reason
    assert "Traceback" in (cluster.cwd / "s/2/foundry.log").read_text()
    assert cluster.state_in_slurm(2)["JobState"] == "FAILED"
    state, reason = cluster.status(3)
    assert state == "lost"
    assert reason == f"Slurm no longer knows job {cluster.slurm_id(3)}; was it canceled before it started?"


@pytest.mark.long
def test_slurm_time_limit_signal_resumes_bit_for_bit(cluster):
    """One job receives the signal that submitit has Slurm send before a time limit; the other job does not."""
    driver = cluster.sweep(*SLURM, "hparams.max_steps=60", "tracking.run_name=alone,disturbed")
    cluster.wait_for_steps(1, 5)
    cluster.ask("scancel", "--signal=USR2", cluster.slurm_id(1))
    cluster.finish(driver)
    assert cluster.state_in_slurm(1)["Restarts"] == "1"
    assert cluster.state_in_slurm(0)["Restarts"] == "0"
    assert "job 1 (tracking.run_name=disturbed): requeued" in cluster.output
    assert steps(cluster.cwd / "s/1") == steps(cluster.cwd / "s/0") == list(range(1, 61))
    assert_same_weights(cluster.cwd / "s/0", cluster.cwd / "s/1")


@pytest.mark.long
def test_preempted_fsdp_job_on_two_nodes_matches_four_local_processes(cluster):
    """Train with FSDP on two nodes of two tasks each; a job in the higher-priority partition takes both nodes."""
    overrides = [
        "distributed=fsdp",
        "data.num_workers=1",
        "hparams.global_batch_size=16",
        "hparams.per_gpu_batch_size=4",
        "hparams.max_steps=25",
    ]
    driver = cluster.sweep(*SLURM, *overrides, "hydra.launcher.nodes=2", "hydra.launcher.tasks_per_node=2")
    cluster.wait_for_steps(0, 3)
    cluster.ask("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--wrap", "true")
    cluster.finish(driver)
    assert cluster.state_in_slurm(0)["Restarts"] == "1"
    assert "job 0: requeued" in cluster.output
    local = ["hydra/launcher=local", "distributed.nproc_per_node=4", "hydra.sweep.dir=local"]
    cluster.finish(cluster.sweep(*overrides, *local))
    assert steps(cluster.cwd / "s/0") == steps(cluster.cwd / "local/0") == list(range(1, 26))
    assert_same_weights(cluster.cwd / "s/0", cluster.cwd / "local/0")


@pytest.mark.long
def test_preempted_grpo_job_matches_an_uninterrupted_run(cluster):
    overrides = [
        "data=arithmetic",
        "data.form=prompts",
        "data.num_rows=64",
        "data.seq_len=160",
        "objective=grpo",
        "objective.max_new_tokens=8",
        "objective.num_prompts_per_step=4",
        "objective.num_generations_per_prompt=4",
        "objective.updates_per_rollout=2",
        "objective.generation_batch_size=8",
        "environment=format",
        "environment.pattern='(?s).*[0-9].*'",
        "evaluation=reward",
        "optimizer=adamw",
        "precision=fp32",
        "hparams.global_batch_size=8",
        "hparams.per_gpu_batch_size=4",
        "hparams.max_steps=200",
    ]
    driver = cluster.sweep(*SLURM, *overrides, "tracking.run_name=a")
    cluster.wait_for_steps(0, 3)
    cluster.ask("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--wrap", "true")
    cluster.finish(driver)
    assert cluster.state_in_slurm(0)["Restarts"] == "1"
    cluster.finish(cluster.sweep(*overrides, "tracking.run_name=a", "hydra.sweep.dir=local"))
    assert steps(cluster.cwd / "s/0") == steps(cluster.cwd / "local/0") == list(range(1, 201))
    assert len({line["reward"] for line in read_metrics(cluster.cwd / "s/0") if "reward" in line}) > 3
    assert_same_weights(cluster.cwd / "s/0", cluster.cwd / "local/0")


@pytest.mark.long
def test_detached_slurm_sweep_is_found_again_by_the_same_command(cluster):
    overrides = [*SLURM, "hydra.launcher.snapshot_code=true", "hparams.max_steps=3", "hparams.lr=1e-3,2e-3"]
    cluster.ask("scontrol", "update", "nodename=n1,n2", "state=drain", "reason=upkeep")
    cluster.finish(cluster.sweep(*overrides, "hydra.launcher.detach=true"))
    array = cluster.slurm_id(0).partition("_")[0]
    assert f"scancel {array}" in cluster.output
    assert cluster.status(0) == ("queued", "")
    driver = cluster.sweep(*overrides)
    cluster.wait(lambda: f"is already in the queue as {array}_1" in cluster.output)
    cluster.ask("scontrol", "update", "nodename=n1,n2", "state=resume")
    cluster.finish(driver)
    assert [cluster.status(job) for job in (0, 1)] == [("finished", "")] * 2
    assert cluster.slurm_id(0) == f"{array}_0"
    assert (cluster.cwd / "s/code/foundry/engine/train.py").is_file()
