"""Every process group of a run has the run's timeouts, including groups that the device mesh or muon creates."""

import json
from pathlib import Path

import pytest
from support.tiny import TINY_LM

WORDS = [
    *TINY_LM,
    "hparams.max_steps=2",
    "hparams.global_batch_size=4",
    "hparams.per_gpu_batch_size=1",
    "tracking.mlflow=false",
    "tracking.plots=false",
    "tracking.log_every_n_steps=1",
    "+tracking.trackers.limits={_target_: support.group_limits.Limits}",
    "evaluation.interval=null",
    "evaluation.max_samples=4",
    "hydra.run.dir=run",
]


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("overrides", "subgroups"),
    [
        (["distributed=ddp", "distributed.nproc_per_node=2"], []),
        (["distributed=fsdp", "distributed.nproc_per_node=2", "optimizer=muon"], []),
        # one subgroup along each dimension of the mesh
        (["distributed=hsdp", "distributed.nproc_per_node=4", "optimizer=muon"], [2, 2]),
    ],
    ids=["ddp", "fsdp", "hsdp"],
)
def test_process_groups_have_the_start_timeout_and_then_the_step_timeout(shell, overrides, subgroups):
    limits = ["distributed.timeout_seconds=100", "distributed.start_timeout_seconds=400"]
    shell.run(*WORDS, *overrides, *limits, variables={"PYTHONPATH": str(Path(__file__).parents[1])})
    start, _, last = map(json.loads, (shell.cwd / "run" / "limits.jsonl").read_text().splitlines())
    world = int(overrides[1].rpartition("=")[2])
    assert start[0] == "start"
    assert {seconds for _, each in start[1] for seconds in each} == {500.0}  # 1.25 times the watchdog's timeout
    assert {seconds for _, each in last[1] for seconds in each} == {125.0}
    # The default group, and one more for the thread that writes checkpoints.
    assert sorted(size for size, _ in last[1]) == sorted([world, world, *subgroups])
