"""Runs on several ranks, on GPUs and on the CPU: layouts, precisions, killed ranks and sweeps."""

import json
import re
from pathlib import Path

import pytest
import torch
from support.devices import DEVICES
from support.outcome import losses, status
from support.tiny import SMALL_LM, TINY_LM

from foundry.core.exit_codes import ExitCode

pytestmark = [pytest.mark.distributed, pytest.mark.long]

TESTS = str(Path(__file__).parents[1])
QUIET = ["tracking=none", "tracking.log_every_n_steps=1", "evaluation.write_samples=false"]
RUN = [*SMALL_LM, *QUIET, "hparams.max_steps=6", "hparams.global_batch_size=8", "hparams.per_gpu_batch_size=2"]
FSDP, TP = "distributed=fsdp", "distributed.tensor_parallel=2"
LAYOUTS = {
    "ddp": (2, ["distributed=ddp"]),
    "ddp, optimizer sharded": (2, ["distributed=ddp", "distributed.shard_optimizer=true"]),
    "fsdp": (2, [FSDP]),
    "fsdp, offload": (2, [FSDP, "distributed.cpu_offload=true"]),
    "fsdp, tensor parallel": (2, [FSDP, TP]),
    "hsdp": (4, ["distributed=hsdp", "distributed.num_replicas=2"]),
    "fsdp, tensor parallel, 4 ranks": (4, [FSDP, TP]),
}
PRECISIONS = ["amp_bf16", "amp_float16", "pure_bf16"]
SECONDS_TO_EXIT = 30
"""Limit for a run on GPUs to exit after one rank was killed; its watchdog would wait ten minutes."""


def need(device, count):
    if device == "cuda" and torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA devices")


def variables(device, **others):
    """Return environment variables for a command; for the device `cpu` they hide the GPUs of this machine."""
    return {"PYTHONPATH": TESTS, **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}), **others}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("device", DEVICES)
def test_losses_of_every_layout_match_one_rank(shell, device, optimizer, precision):
    if device == "cpu" and (optimizer, precision) != ("muon", "amp_bf16"):
        pytest.skip("on CPUs tests/distributed/test_precision_ranks.py shows it")
    need(device, 2)
    run = [*RUN, f"optimizer={optimizer}", f"precision={precision}"]
    shell.run(*run, "hydra.run.dir=alone", variables=variables(device))
    expected = losses(shell.cwd / "alone")
    assert expected[6] < expected[1]
    for number, (layout, (ranks, overrides)) in enumerate(LAYOUTS.items()):
        if device == "cuda" and torch.cuda.device_count() < ranks:
            continue
        if precision == "amp_float16" and "offload" in layout:  # Refused: the loss scaler needs gradients on the GPU.
            continue
        place = [f"distributed.nproc_per_node={ranks}", f"hydra.run.dir=run_{number}"]
        shell.run(*run, *overrides, *place, variables=variables(device))
        assert losses(shell.cwd / f"run_{number}") == pytest.approx(expected, rel=5e-4), layout


@pytest.mark.parametrize("phase", ["step", "evaluation", "save"])
@pytest.mark.parametrize("device", DEVICES)
def test_killed_rank_ends_the_run_and_is_named(shell, device, phase):
    """In a step or an evaluation, rank 0 waits in a collective; in a save, it waits for the files of rank 1."""
    need(device, 2)
    folder = shell.cwd / "conf" / "objective"
    folder.mkdir(parents=True)
    (folder / "faulty.yaml").write_text("_target_: support.faulty.Objective\n")
    words = ["objective=faulty", FSDP, "distributed.nproc_per_node=2", "hydra.run.dir=run"]
    words += ["hparams.max_steps=40", "evaluation.interval='4 steps'", "checkpoint.interval='4 steps'"]
    run = [word for word in RUN if not word.startswith("hparams.max_steps")]
    own = {"FAULT": "kill", "FAULTY_RANK": "1", "FAULTY_PHASE": phase}
    process = shell.start("--config-dir=conf", *run, *words, variables=variables(device, **own))
    shell.wait_for_steps(process, shell.cwd / "run", 1)
    _, stderr = process.communicate(timeout=SECONDS_TO_EXIT if device == "cuda" else 240)
    assert process.returncode == ExitCode.RANK_LOST, stderr
    end = status(shell.cwd / "run")
    assert end["state"] == "failed"
    assert re.match(r"rank 1 failed: killed by SIGKILL: out of memory\?", end["reason"])
    assert end["reason"] in stderr


@pytest.mark.parametrize("device", DEVICES)
def test_local_sweep_jobs_have_their_own_gpus(shell, device):
    """On a CPU, CUDA_VISIBLE_DEVICES pretends GPUs 7 and 9."""
    need(device, 2)
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("this machine has real GPUs")
    visible = {"CUDA_VISIBLE_DEVICES": "7,9"} if device == "cpu" else {}
    tracker = "+tracking.trackers.devices={_target_: support.seen_devices.SeenDevices}"
    words = [*TINY_LM, *QUIET, tracker, "hydra/launcher=local", "hydra.sweep.dir=sweep", "hparams.max_steps=2"]
    shell.run("-m", *words, "hparams.seed=1,2", variables=variables("cuda", **visible))
    seen = [json.loads(path.read_text()) for path in sorted(shell.cwd.glob("sweep/*/devices.json"))]
    assert len(seen) == 2
    assert len({job["visible"] for job in seen}) == 2
    if device == "cpu":
        assert {job["visible"] for job in seen} == {"7", "9"}
    else:
        assert [job["count"] for job in seen] == [1, 1]
        assert len({job["uuid"] for job in seen}) == 2
    alone = [*TINY_LM, *QUIET, "hparams.max_steps=2", "hparams.seed=2", "hydra.run.dir=alone"]
    shell.run(*alone, variables=variables(device))
    assert losses(shell.cwd / "sweep" / "1") == losses(shell.cwd / "alone")


@pytest.mark.gpu
def test_compiled_blocks_under_fsdp_match_eager_losses(shell):
    """tests/e2e/test_runs.py covers compilation on CPUs."""
    need("cuda", 2)
    run = [*RUN, FSDP, "distributed.nproc_per_node=2", "precision=amp_bf16"]
    for name, choice in (("eager", "false"), ("compiled", "true")):
        shell.run(*run, f"hparams.torchcompile={choice}", f"hydra.run.dir={name}", variables=variables("cuda"))
    assert losses(shell.cwd / "compiled") == pytest.approx(losses(shell.cwd / "eager"), rel=2e-3)
