"""Operations of a training step follow the settings of the run: gradient checkpointing, base dtype, microbatches."""

import pytest
import torch
from support.devices import Operations
from support.tiny import SMALL_LM

from foundry import compose, run

RECOMPUTED = "hparams.grad_checkpointing=true"
ONE_STEP = [
    *SMALL_LM,
    "hparams.max_steps=1",
    "hparams.global_batch_size=8",
    "checkpoint=none",
    "tracking=none",
    "evaluation.interval=null",
    "evaluation.max_samples=4",
    "evaluation.write_samples=false",
]


@pytest.fixture
def trained(tmp_path, cache, monkeypatch):
    """Return a function that trains one step and returns its operations and the metric of the model."""
    monkeypatch.setenv("FOUNDRY_CACHE", str(cache))

    def train(name, *words):
        with Operations() as operations:
            result = run(compose([*ONE_STEP, *words]), tmp_path / name)
        return operations, result.metric

    return train


def test_grad_checkpointing_policy_sets_the_recomputed_operations(trained):
    found = [
        trained("plain"),
        trained("selective", RECOMPUTED, "hparams.grad_checkpointing_policy=selective"),
        trained("full", RECOMPUTED),
    ]
    products, activations = ([each.names.count(name) for each, _ in found] for name in ("aten::mm", "aten::silu"))
    assert products[0] == products[1] < products[2]
    assert activations[0] < activations[1] == activations[2]
    assert len({metric for _, metric in found}) == 1


def test_frozen_matrices_are_cast_per_product_only_with_fp32_base_dtype(trained):
    words = ["peft=lora", "optimizer=adamw", "precision=amp_bf16"]
    found = [trained("auto", *words), trained("fp32", *words, "peft.base_dtype=fp32")]
    casts = [each.seen.count(("aten::_to_copy", torch.bfloat16)) for each, _ in found]
    assert casts[0] < casts[1]
    assert found[0][1] == found[1][1]


def test_step_runs_one_backward_pass_per_microbatch(trained):
    found = [trained(f"of {size}", f"hparams.per_gpu_batch_size={size}") for size in (8, 2)]
    assert [each.names.count("aten::embedding_dense_backward") for each, _ in found] == [1, 4]
