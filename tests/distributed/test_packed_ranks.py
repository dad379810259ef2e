"""Runs with packed rows have the losses of unpacked runs, on any number of ranks."""

import json

import pytest
from support.outcome import losses

pytestmark = [pytest.mark.distributed, pytest.mark.long]

DROPOUT = ["objective.hidden_dropout=0.2", "objective.attention_dropout=0.1"]
LEARNING = ["objective=sft", *DROPOUT]
RUN = [
    "debug=fast",
    "data=chats",
    "data.path=chats.jsonl",
    "data.seq_len=128",
    "data.vocab_size=280",
    "precision=fp32",
    "model.hidden_size=16",
    "model.intermediate_size=32",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.num_kv_heads=2",
    "hparams.global_batch_size=8",
    "evaluation.write_samples=false",
    "tracking=none",
    "tracking.log_every_n_steps=1",
]
RANKS = ["distributed.nproc_per_node=2", "data.packing=true"]
LAYOUTS = {
    "packed": ["data.packing=true", "hparams.per_gpu_batch_size=1", "hparams.grad_checkpointing=true"],
    "read ahead": ["data.packing=true", "hparams.per_gpu_batch_size=4", "data.num_workers=1"],
    "DDP": [*RANKS, "distributed=ddp", "hparams.per_gpu_batch_size=1"],
    "FSDP2": [*RANKS, "distributed=fsdp", "hparams.per_gpu_batch_size=4"],
}


def test_losses_of_packed_runs_match_unpacked_runs(shell):
    rows = [{"prompt": f"Count {number}", "completion": "so" * (1 + number % 7)} for number in range(40)]
    (shell.cwd / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    learning = [*RUN, *LEARNING]
    shell.run(*learning, "hparams.per_gpu_batch_size=2", "hydra.run.dir=plain")
    expected = list(losses(shell.cwd / "plain").values())
    for number, (layout, overrides) in enumerate(LAYOUTS.items()):
        shell.run(*learning, *overrides, f"hydra.run.dir=run_{number}")
        assert list(losses(shell.cwd / f"run_{number}").values()) == pytest.approx(expected, rel=1e-5), layout
    student = [*RUN, "objective=distillation", "objective.teacher=plain", "hparams.seed=7"]
    shell.run(*student, "hparams.per_gpu_batch_size=2", "hydra.run.dir=taught")
    expected = list(losses(shell.cwd / "taught").values())
    for layout in ("packed", "FSDP2"):
        shell.run(*student, *LAYOUTS[layout], f"hydra.run.dir=taught_{layout}")
        assert list(losses(shell.cwd / f"taught_{layout}").values()) == pytest.approx(expected, rel=1e-5), layout
    shell.run(*student, *LAYOUTS["packed"], "hydra.run.dir=resumed", "hparams.max_steps=3", "scheduler.horizon=5")
    shell.run(*student, *LAYOUTS["packed"], "hydra.run.dir=resumed", "scheduler.horizon=5")
    assert losses(shell.cwd / "resumed") == losses(shell.cwd / "taught_packed")
