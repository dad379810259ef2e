"""Two nodes of two tasks each give the same bytes as four processes on one machine, with FSDP and DDP."""

import json

import pytest
from cluster import SLURM

from foundry.tracking.metrics_file import read_metrics

WORDS = [
    "distributed=fsdp,ddp",
    "hparams.global_batch_size=16",
    "hparams.per_gpu_batch_size=2",
    "hparams.max_steps=4",
]
MEASURED = ("step", "loss", "grad_norm", "lr", "val_loss")


def measured(run_dir):
    return [{name: line[name] for name in MEASURED if name in line} for line in read_metrics(run_dir)]


def shards(run_dir):
    return {path.name: path.read_bytes() for path in (run_dir / "checkpoints" / "latest").glob("*.safetensors")}


@pytest.mark.long
@pytest.mark.slurm
def test_fsdp_and_ddp_on_two_slurm_nodes_match_one_machine_bit_for_bit(cluster):
    two_nodes = [*SLURM, "hydra.launcher.nodes=2", "hydra.launcher.tasks_per_node=2", "hydra.launcher.mem_gb=2"]
    one_node = ["hydra/launcher=local", "distributed.nproc_per_node=4", "hydra.sweep.dir=local"]
    cluster.finish(cluster.sweep(*WORDS, *two_nodes))
    cluster.finish(cluster.sweep(*WORDS, *one_node))
    for job, strategy in ((0, "fsdp"), (1, "ddp")):
        remote, local = cluster.cwd / "s" / str(job), cluster.cwd / "local" / str(job)
        plan = json.loads((remote / "plan.json").read_text())
        assert (plan["strategy"], plan["world_size"], plan["accum_freq"]) == (strategy, 4, 2)
        assert len(measured(remote)) == 5
        assert measured(remote) == measured(local)
        assert len(shards(remote)) == 4
        assert shards(remote) == shards(local)
