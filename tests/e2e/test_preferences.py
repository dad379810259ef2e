"""Direct preference optimisation as a run, with a frozen reference: on any layout, resumed."""

import json
import math

import pytest
from tiny import TINY_LM
from warm import WarmShell

PAIRS = '''
import torch

from foundry.data.splits import DataSplits


class Pairs:
    """Responses that count up are chosen, and those that count down rejected."""

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
}


@pytest.fixture
def shell(tmp_path, cache):
    (tmp_path / "own.py").write_text(PAIRS)
    (tmp_path / "conf" / "data").mkdir(parents=True)
    (tmp_path / "conf" / "data" / "pairs.yaml").write_text(DATA)
    return WarmShell(tmp_path, cache)


def losses(shell, name):
    lines = map(json.loads, (shell.cwd / name / "metrics.jsonl").open())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.distributed
def test_it_learns_the_order_on_any_layout(shell):
    for name, overrides in LAYOUTS.items():
        shell.run(*RUN, *overrides, f"hydra.run.dir={name}")
    one = losses(shell, "one")
    assert one[0] == pytest.approx(math.log(2), abs=1e-6)
    for name in ("cut", "ddp", "fsdp"):
        assert losses(shell, name) == pytest.approx(one, rel=1e-4)
    result = json.loads((shell.cwd / "one" / "result.json").read_text())
    assert result["val_accuracy"] > 0.9
    assert result["val_margin"] > 0
    assert result["val_loss"] < 0.5


def test_a_resumed_run_keeps_its_reference(shell):
    shell.run(*RUN, *LAYOUTS["one"], "hydra.run.dir=whole")
    shell.run(*RUN, *LAYOUTS["one"], "hydra.run.dir=half", "hparams.max_steps=6")
    shell.run(*RUN, *LAYOUTS["one"], "hydra.run.dir=half")
    assert losses(shell, "half") == losses(shell, "whole")


def test_the_plan_counts_the_reference_and_both_responses(shell):
    memory = {}
    for name, objective in (("pairs", []), ("longer", ["data.seq_len=32"])):
        shell.run(*RUN, *objective, *LAYOUTS["one"], f"hydra.run.dir={name}", module="foundry.plan")
        memory[name] = json.loads((shell.cwd / name / "plan.json").read_text())["memory"]
    assert memory["pairs"]["frozen"] == memory["pairs"]["weights"] + memory["pairs"]["buffers"] > 0
    assert memory["longer"]["activations_estimated"] > 1.5 * memory["pairs"]["activations_estimated"] > 0
