"""Supervised fine-tuning on conversations of different lengths gives the same weights in any layout and on resume."""

import json

import pytest
import torch
from parity_parts import differences, run_all, weights
from support.composition import configure

pytestmark = [pytest.mark.distributed, pytest.mark.long]

WORDS = [
    "data=chats",
    "objective=sft",
    "optimizer=adamw",
    "precision=fp32",
    "data.seq_len=96",
    "data.vocab_size=257",
    "model.hidden_size=16",
    "model.intermediate_size=24",
    "model.num_layers=2",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "hparams.lr=3e-2",
    "hparams.global_batch_size=8",
    "hparams.grad_clip_norm=1.0",
    "scheduler.warmup=0.1",
    "scheduler.horizon='12'",
    "tracking=none",
    "tracking.progress=false",
    "tracking.log_every_n_steps=1",
]
LAYOUTS = {
    "1 x 8": (1, 8, []),
    "1 x 1": (1, 1, []),
    "DDP 2 x 2": (2, 2, ["distributed=ddp"]),
    "FSDP2 2 x 4": (2, 4, ["distributed=fsdp"]),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return configuration and run directory by layout after twelve steps; "resumed" was interrupted after five."""
    root = tmp_path_factory.mktemp("sft")
    rows = [
        {"prompt": f"What is {n} times {n}?" * (1 + n % 2), "completion": f"It is {n * n}." if n % 3 else "No idea."}
        for n in range(40)
    ]
    path = root / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs, jobs = {}, []

    def job(layout, name, steps):
        processes, microbatch, own = LAYOUTS[layout]
        config = configure(
            *WORDS,
            *own,
            f"data.path={path}",
            f"data.cache_dir={root / 'cache'}",
            f"hparams.max_steps={steps}",
            f"hparams.per_gpu_batch_size={microbatch}",
            f"distributed.nproc_per_node={processes}",
        )
        runs[name] = run = config, root / name
        run[1].mkdir(exist_ok=True)
        return processes, run

    for layout in LAYOUTS:
        jobs.append(job(layout, layout, 12))
    run_all([*jobs, job("1 x 8", "resumed", 5)])
    run_all([job("1 x 8", "resumed", 12)])
    return runs


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_sft_weights_and_metrics_agree_between_layouts(trained, layout):
    assert differences(weights(*trained["1 x 8"]), weights(*trained[layout]))[0] < 1e-5
    for one, other in zip(lines(trained["1 x 8"][1]), lines(trained[layout][1]), strict=True):
        for name in ("loss", "accuracy", "val_loss", "val_accuracy", "tokens"):
            assert (name in one) == (name in other)
            assert name not in one or one[name] == pytest.approx(other[name], rel=1e-5), name


def test_resumed_sft_run_matches_an_uninterrupted_run_bit_for_bit(trained):
    undisturbed, resumed = weights(*trained["1 x 8"]), weights(*trained["resumed"])
    assert all(torch.equal(undisturbed[name], resumed[name]) for name in undisturbed)
    assert lines(trained["1 x 8"][1])[-1]["val_loss"] == lines(trained["resumed"][1])[-1]["val_loss"]


def test_sft_run_reduces_the_loss(trained):
    logged = [line for line in lines(trained["1 x 8"][1]) if "loss" in line]
    assert logged[-1]["loss"] < 0.9 * logged[0]["loss"]
    assert logged[-1]["tokens"] < 12 * 8 * 96
