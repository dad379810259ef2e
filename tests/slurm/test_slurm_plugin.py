"""The launcher `submitit_slurm` of hydra-submitit-launcher, on a real Slurm."""

import json

import pytest
from cluster import assert_same_weights

pytestmark = [pytest.mark.slurm, pytest.mark.long]

PLUGIN = ["hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=5", "hydra.launcher.signal_delay_s=30"]
PLUGIN += ["hydra.launcher.mem_gb=1", "hydra.launcher.cpus_per_task=1", "hydra.sweep.dir=s"]


def test_submitit_slurm_on_two_nodes_survives_a_time_limit(cluster):
    """Two array jobs of four ranks each; one gets the signal for a time limit, saves and is requeued."""
    own = cluster.own_objective()
    nodes = ["hydra.launcher.nodes=2", "hydra.launcher.tasks_per_node=2"]
    ranks = ["distributed=fsdp", "hparams.per_gpu_batch_size=2", "hparams.max_steps=30"]
    again = ["hydra.launcher.max_num_timeout=1", "hydra.launcher.array_parallelism=1", "hparams.seed=1,2"]
    driver = cluster.sweep(*PLUGIN, *own, *nodes, *ranks, *again)
    cluster.wait_for_steps(0, 3)
    for _ in range(3):
        cluster.ask("scancel", "--signal=USR2", cluster.slurm_id(0))
    cluster.wait(lambda: "job 0 (hparams.seed=1): requeued (" in cluster.output)
    assert cluster.report()[1] == 3, "none has failed"
    (cluster.cwd / "slow").unlink()
    cluster.finish(driver)
    assert [cluster.status(job) for job in (0, 1)] == [("finished", "")] * 2
    assert [cluster.state_in_slurm(job)["Restarts"] for job in (0, 1)] == ["1", "0"]
    assert json.loads((cluster.cwd / "s/0/plan.json").read_text())["world_size"] == 4
    local = ["hydra/launcher=local", "distributed.nproc_per_node=4", "hydra.sweep.dir=local"]
    cluster.finish(cluster.sweep(*own, *ranks, "hparams.seed=1", *local))
    assert_same_weights(cluster.cwd / "s/0", cluster.cwd / "local/0")
    cluster.finish(cluster.sweep(*PLUGIN, *own, *nodes, *ranks, *again))
    assert "2 of 2 jobs have already finished" in cluster.output


def test_submitit_slurm_without_sbatch_is_refused(cluster):
    whole = cluster.environment
    cluster.environment = {**whole, "PATH": "/nowhere"}
    driver = cluster.sweep(*PLUGIN)
    cluster.environment = whole
    cluster.finish(driver, code=2)
    assert cluster.output == (
        "hydra/launcher: is submitit_slurm but there is no sbatch on this machine; submit from a login node, or choose "
        "hydra/launcher=local\n"
    )
    assert not (cluster.cwd / "s").exists()
