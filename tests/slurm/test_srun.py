"""Ranks started by a real `srun` on two nodes."""

import json
import subprocess
import sys

import pytest

from foundry.tracking.metrics_file import read_metrics

WORDS = [
    "hparams=diffusion",
    "model.hidden_size=16",
    "model.num_layers=2",
    "model.num_heads=2",
    "hparams.global_batch_size=16",
    "hparams.per_gpu_batch_size=4",
    "hparams.max_steps=3",
    "tracking=none",
    "tracking.log_every_n_steps=1",
    "evaluation.write_samples=false",
]


def srun(environment, cwd, *overrides):
    """Run `python -m foundry` as two tasks on two nodes."""
    command = ["srun", "-N2", "-n2", sys.executable, "-m", "foundry", *overrides]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


def losses(run_dir):
    return [line["loss"] for line in read_metrics(run_dir / "metrics.jsonl") if "loss" in line]


@pytest.mark.long
@pytest.mark.slurm
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_srun_on_two_nodes_matches_one_process(slurm, tmp_path, strategy):
    """Without RANK and MASTER_ADDR, ranks come from the variables of the Slurm step."""
    command = [sys.executable, "-m", "foundry", *WORDS]
    alone = subprocess.run(
        [*command, "hydra.run.dir=alone"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert alone.returncode == 0, alone.stderr
    together = srun(slurm, tmp_path, *WORDS, f"distributed={strategy}", "hydra.run.dir=together")
    assert together.returncode == 0, together.stderr
    assert json.loads((tmp_path / "together" / "plan.json").read_text())["world_size"] == 2
    assert losses(tmp_path / "together") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    assert together.stdout.count("held-out loss") == alone.stdout.count("held-out loss"), "only rank 0 speaks"
    assert {path.name for path in tmp_path.iterdir()} == {"alone", "together"}


@pytest.mark.long
@pytest.mark.slurm
def test_srun_config_error_ends_all_ranks_before_training(slurm, tmp_path):
    done = srun(slurm, tmp_path, "hparams.leer=1")
    assert done.returncode == 2
    assert "did you mean hparams.lr?" in done.stderr
    assert list(tmp_path.iterdir()) == []
