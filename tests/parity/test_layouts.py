"""The same global batches give the same weights for any number of ranks and microbatches.

The language model is trained with each optimizer; diffusion, policy, vision-language and vision-language-action models
with AdamW. With every optimizer for each of them, as a table:

    FOUNDRY_ALL_LAYOUTS=1 pytest -n 0 -s -m "long or not long" tests/parity/test_layouts.py
"""

import json
import os
from functools import cache

import pytest
import torch
from parity_parts import differences, run_all, weights
from support.examples import selection

from foundry.parts.model import build_model

pytestmark = pytest.mark.distributed

# name: (processes, microbatch, overrides); the global batch is 16 in every layout.
LAYOUTS = {
    "1 x 4": (1, 4, []),
    "1 x 1": (1, 16, []),
    "DDP 2 x 2": (2, 4, ["distributed=ddp"]),
    "FSDP2 2 x 2": (2, 4, ["distributed=fsdp"]),
    "FSDP2 4 x 1": (4, 4, ["distributed=fsdp"]),
    "HSDP 2x2 x 2": (4, 2, ["distributed=hsdp"]),
}
# Overrides by optimizer; the learning rates are high enough that twenty steps change the weights visibly.
OPTIMIZERS = {
    "muon": ["optimizer=muon"],
    "muon_options": [
        "optimizer=muon",
        "optimizer.momentum_warmup_start=0.85",
        "optimizer.momentum_warmup='10'",
        "optimizer.cautious_weight_decay=true",
        "optimizer.row_variance=true",
    ],
    "muon_mup": ["optimizer=muon", "model.parametrization=mup", "model.base_width=16"],
    "adamw": ["optimizer=adamw"],
    "adamw_mup": ["optimizer=adamw", "model.parametrization=mup", "model.base_width=16", "model.tie_embeddings=true"],
    "sgd": ["optimizer=sgd", "hparams.lr=0.1"],
}
# AdamW reaches 1.5e-5 on Intel CPUs with AMX, which round the products of different microbatches differently.
TOLERANCES = {**dict.fromkeys(OPTIMIZERS, 2e-5), "sgd": 1e-5}
OTHERS = [
    pytest.param(name, marks=pytest.mark.long) if processes > 2 else name
    for name, (processes, *_) in list(LAYOUTS.items())[1:]
]
CASES = [("lm", "muon")]
LONG_CASES = [("lm", name) for name in ("sgd", "muon_options", "muon_mup", "adamw_mup")]
LONG_CASES += [(task, "adamw") for task in ("lm", "diffusion", "policy", "vlm", "vla")]
if os.environ.get("FOUNDRY_ALL_LAYOUTS"):
    LONG_CASES += [(task, optimizer) for task in ("diffusion", "policy", "vlm", "vla") for optimizer in ("muon", "sgd")]
CASES = [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG_CASES)]


@pytest.fixture(scope="module")
def trained(configure, tmp_path_factory):
    """Return a function from (task, optimizer, layout) to configuration and run directory after 20 steps in fp32."""
    root = tmp_path_factory.mktemp("layouts")

    @cache
    def train(task, optimizer):
        runs, jobs = {}, []
        for layout, (processes, microbatch, overrides) in LAYOUTS.items():
            if processes > 2 and not selection.is_all:
                continue
            config = configure(
                task,
                *overrides,
                *OPTIMIZERS[optimizer],
                "hparams.max_steps=20",
                f"hparams.per_gpu_batch_size={microbatch}",
                "tracking.norms_every_n_steps=10",
                f"distributed.nproc_per_node={processes}",
            )
            runs[layout] = run = config, root / f"{task} {optimizer} {layout}"
            run[1].mkdir()
            jobs.append((processes, run))
        run_all(jobs)
        return runs

    return lambda task, optimizer, layout: train(task, optimizer)[layout]


@pytest.mark.parametrize(("task", "optimizer"), CASES)
@pytest.mark.parametrize("layout", OTHERS)
def test_final_weights_agree_between_layouts(trained, task, optimizer, layout, record_property):
    first, other = weights(*trained(task, optimizer, "1 x 4")), weights(*trained(task, optimizer, layout))
    found, largest = differences(first, other)
    record_property("largest relative difference", found)
    print(f"\n| {task:9} | {optimizer:5} | {layout:12} | {found:.1e} | {largest:.1e} |", end="")  # noqa: T201
    assert found < TOLERANCES[optimizer]


def norms(run_dir):
    """Return the norms of gradient, weights and update by step and block."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {(line["step"], key): value for line in lines for key, value in line.items() if "_norm/" in key}


@pytest.mark.parametrize("layout", OTHERS)
def test_block_norms_agree_between_layouts(trained, layout):
    expected = norms(trained("lm", "muon", "1 x 4")[1])
    assert {step for step, _ in expected} == {1, 10, 20}
    assert {"grad_norm/lm_head", "update_norm/model.layers.0", "weight_norm/model.layers.1"} <= {
        key for _, key in expected
    }
    assert all(value > 0 for (step, _), value in expected.items() if step < 20)
    assert norms(trained("lm", "muon", layout)[1]) == pytest.approx(expected, rel=1e-4, abs=1e-7)


@pytest.mark.long
@pytest.mark.parametrize("layout", OTHERS)
def test_averaged_weights_and_validation_loss_agree_between_layouts(trained, layout):
    first, other = trained("diffusion", "adamw", "1 x 4"), trained("diffusion", "adamw", layout)
    assert differences(weights(*first, ema=True), weights(*other, ema=True))[0] < 1e-5
    results = [json.loads((run_dir / "result.json").read_text()) for _, run_dir in (first, other)]
    assert results[0]["val_loss"] == pytest.approx(results[1]["val_loss"], rel=1e-5)


@pytest.mark.parametrize(("task", "optimizer"), CASES)
def test_training_changes_the_weights(trained, task, optimizer):
    config, run_dir = trained(task, optimizer, "1 x 4")
    initial, moved = build_model(config).state_dict(), weights(config, run_dir)
    assert differences(initial, moved)[0] > 1e-2
    assert all(torch.isfinite(tensor).all() for tensor in moved.values())
