"""Runs of direct preference optimization with a frozen reference: layouts, resume, plan and sweep."""

import json
import math

import pytest
import torch
from safetensors.torch import load, load_file
from support.in_process import Commands
from support.tiny import TINY_LM
from support.warm import WarmShell

PAIRS = '''
import torch

from foundry.data.splits import DataSplits


class Pairs:
    """Pairs of a chosen response that counts up and a rejected one that counts down."""

    def __init__(self, count, seq_len, vocab_size):
        self.count, self.seq_len, self.vocab_size = count, seq_len, vocab_size

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        steps = torch.arange(self.seq_len + 1)
        rows = torch.stack([index + steps, index - steps]) % self.vocab_size
        lengths = torch.tensor([[6 + index % 5], [9 - index % 4]])
        targets = rows[:, 1:].masked_fill((steps[:-1] < 2) | (steps[:-1] >= lengths), -100)
        return {"tokens": rows[:, :-1], "targets": targets}


def pairs(*, seed, num_workers, cache_dir, seq_len, vocab_size):
    return DataSplits(
        train=Pairs(64, seq_len, vocab_size),
        validation=Pairs(16, seq_len, vocab_size),
        fingerprint="pairs",
        tokens_per_sample=2 * seq_len,
    )
'''
DATA = """
_target_: own.pairs
seed: ${hparams.seed}
num_workers: 0
cache_dir: cache
seq_len: 16
vocab_size: 64
"""
RUN = [
    "--config-dir=conf",
    *[override for override in TINY_LM if not override.startswith(("objective.", "data."))],
    "data=pairs",
    "objective=dpo",
    "objective.ref_policy_kl_penalty=0.5",
    "optimizer=adamw",
    "hparams.lr=3e-3",
    "hparams.global_batch_size=8",
    "evaluation.write_samples=false",
    "tracking=none",
    "tracking.log_every_n_steps=1",
    "precision=fp32",
    "scheduler.horizon=12",
    "hparams.max_steps=12",
]
LAYOUTS = {
    "one": ["hparams.per_gpu_batch_size=8"],
    "cut": ["hparams.per_gpu_batch_size=2"],
    "ddp": ["distributed=ddp", "distributed.nproc_per_node=2", "hparams.per_gpu_batch_size=4"],
    "fsdp": ["distributed=fsdp", "distributed.nproc_per_node=2", "hparams.per_gpu_batch_size=2"],
    "copy": [
        "distributed=fsdp",
        "distributed.nproc_per_node=2",
        "hparams.per_gpu_batch_size=4",
        "objective.reference=copy",
    ],
    "tensor_parallel": [
        "distributed=fsdp",
        "distributed.nproc_per_node=4",
        "distributed.tensor_parallel=2",
        "hparams.per_gpu_batch_size=2",
        "objective.reference=copy",
    ],
}


@pytest.fixture
def shell(tmp_path, cache):
    (tmp_path / "own.py").write_text(PAIRS)
    (tmp_path / "conf" / "data").mkdir(parents=True)
    (tmp_path / "conf" / "data" / "pairs.yaml").write_text(DATA)
    return WarmShell(tmp_path, cache, {"PYTHONPATH": "."})


@pytest.fixture
def run_command(shell, cache):
    return Commands(shell.cwd, cache, shell.variables)


def losses(shell, name):
    lines = map(json.loads, (shell.cwd / name / "metrics.jsonl").open())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.long
@pytest.mark.distributed
def test_dpo_learns_the_preference_equally_on_all_layouts(shell):
    for name, overrides in LAYOUTS.items():
        shell.run(*RUN, *overrides, f"hydra.run.dir={name}")
    one = losses(shell, "one")
    assert one[0] == pytest.approx(math.log(2), abs=1e-6)
    for name in list(LAYOUTS)[1:]:
        assert losses(shell, name) == pytest.approx(one, rel=1e-5)
    result = json.loads((shell.cwd / "one" / "result.json").read_text())
    assert result["val_accuracy"] > 0.9
    assert result["val_margin"] > 0
    assert result["val_loss"] < 0.5


@pytest.mark.parametrize("reference", ["cached", pytest.param("copy", marks=pytest.mark.long)])
def test_resumed_dpo_run_keeps_its_reference(run_command, reference):
    run = [*RUN, *LAYOUTS["one"], f"objective.reference={reference}"]
    run_command(*run, "hydra.run.dir=whole")
    run_command(*run, "hydra.run.dir=half", "hparams.max_steps=6")
    file = run_command.cwd / "half" / "columns.safetensors"
    before = file.stat() if file.exists() else None
    _, log = run_command(*run, "hydra.run.dir=half")
    assert losses(run_command, "half") == losses(run_command, "whole")
    assert (before is None) == (reference == "copy")
    if before is not None:  # the cached reference is not recomputed or rewritten
        assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
        assert "once before the first step" not in log


@pytest.mark.long
def test_damaged_reference_columns_are_recomputed_from_the_initial_weights(shell):
    run = [*RUN, *LAYOUTS["one"]]
    shell.run(*run, "hydra.run.dir=run", "hparams.max_steps=6")
    file = shell.cwd / "run" / "columns.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    _, log = shell.run(*run, "hydra.run.dir=run")
    assert "columns.safetensors is missing or has changed since it was written; computing it again" in log
    assert load_file(file)["train.reference"].shape == (64, 2)
    assert all(torch.equal(tensor, load(whole)[name]) for name, tensor in load_file(file).items())


@pytest.mark.long
def test_plan_of_dpo_counts_a_copied_reference_and_both_responses(shell):
    memory = {}
    for name, overrides in (
        ("cached", []),
        ("copied", ["objective.reference=copy"]),
        ("longer", ["objective.reference=copy", "data.seq_len=32"]),
    ):
        shell.run(*RUN, *overrides, *LAYOUTS["one"], f"hydra.run.dir={name}", module="foundry.plan")
        memory[name] = json.loads((shell.cwd / name / "plan.json").read_text())["memory"]
    assert memory["cached"]["frozen"] == 0
    assert memory["copied"]["frozen"] == memory["copied"]["weights"] + memory["copied"]["buffers"] > 0
    assert memory["cached"]["activations_estimated"] == memory["copied"]["activations_estimated"]
    memory["pairs"] = memory["copied"]
    assert memory["longer"]["activations_estimated"] > 1.5 * memory["pairs"]["activations_estimated"] > 0


@pytest.mark.long
def test_sweep_over_the_dpo_penalty_with_the_local_launcher_is_reported(shell):
    sweep = ["-m", *RUN, *LAYOUTS["one"], "objective.ref_policy_kl_penalty=0.1,0.5", "evaluation.metric=val_margin"]
    local = [
        "evaluation.direction=maximize",
        "hydra/launcher=local",
        "hydra.launcher.n_jobs=2",
        "hydra.sweep.dir=sweep",
    ]
    shell.run(*sweep, *local)
    stdout, stderr = shell.run("dir=sweep", module="foundry.report")
    assert stderr == ""
    lines = stdout.splitlines()
    assert lines[0].split()[:3] == ["job", "ref_policy_kl_penalty", "state"]
    results = [json.loads((shell.cwd / "sweep" / str(number) / "result.json").read_text()) for number in range(2)]
    assert results[1]["val_margin"] > results[0]["val_margin"] > 0
    assert [line.split()[:2] for line in lines[1:3]] == [["1", "0.5"], ["0", "0.1"]]
    assert "2 jobs: 2 finished" in lines
    assert (shell.cwd / "sweep" / "report.png").is_file()
