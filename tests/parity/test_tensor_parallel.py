"""Tensor-parallel runs train as one process, under any layout and optimizer."""

import json
from functools import cache

import pytest
from parity_parts import differences, run_all, weights

pytestmark = pytest.mark.distributed
STEPS = 12
# name: (processes, microbatch, overrides); the global batch is 16 in every layout.
ONE = (1, 4, [])
LAYOUTS = {
    "1 x 2": (2, 8, ["distributed=fsdp"]),
    "fsdp 2 x 2": (4, 4, ["distributed=fsdp"]),
    "hsdp 2 x 1 x 2": (4, 4, ["distributed=hsdp", "distributed.num_replicas=2"]),
    "ddp with a sharded optimizer 2 x 2": (4, 2, ["distributed=ddp", "distributed.shard_optimizer=true"]),
    "kept weights 2 x 2": (4, 2, ["distributed=fsdp", "distributed.gradient_sync=last_keep_params"]),
}
VARIANTS = {
    "adamw": [],
    "muon": ["optimizer=muon", "hparams.lr=2e-3"],
    "muon, with its options": [
        "optimizer=muon",
        "hparams.lr=2e-3",
        "optimizer.cautious_weight_decay=true",
        "optimizer.row_variance=true",
    ],
    "sgd, with norms of queries and keys": [
        "optimizer=sgd",  # Adam's updates would hide a gradient that lacks the other ranks' part
        "hparams.lr=0.1",
        "model.qk_norm=true",
        "model.zero_init_outputs=true",
    ],
    "sgd, with residual scalars, value embeddings and capped logits": [
        "optimizer=sgd",
        "model.qk_norm=false",
        "model.zero_init_outputs=false",
        "hparams.lr=0.1",
        "model.residual_scalars=true",
        "model.value_embeddings=[0,-1]",
        "model.logit_softcap=2",
    ],
    "muon, parametrized for the width": [
        "optimizer=muon",
        "hparams.lr=2e-3",
        "model.parametrization=mup",
        "model.base_width=16",
    ],
    "tied, averaged and recomputed": [
        "model.tie_embeddings=true",
        "hparams.ema_decay=0.9",
        "hparams.grad_checkpointing=true",
    ],
}


@pytest.fixture(scope="module")
def trained(configure, tmp_path_factory):
    """Return a function from (variant, layout) to configuration and run directory; layout None is one process."""
    root = tmp_path_factory.mktemp("tensor_parallel")

    @cache
    def train(variant, layout, *others):
        processes, microbatch, overrides = ONE if layout is None else LAYOUTS[layout]
        config = configure(
            "lm",
            "data.vocab_size=62",  # 31 rows per rank, which FSDP2 shards into 16 and 15.
            *VARIANTS[variant],
            "optimizer.weight_decay=0.1",
            f"hparams.max_steps={STEPS}",
            f"hparams.per_gpu_batch_size={microbatch}",
            *overrides,
            *([] if layout is None else ["distributed.tensor_parallel=2"]),
            "tracking.norms_every_n_steps=6",
            f"distributed.nproc_per_node={processes}",
            *others,
        )
        run_dir = root / f"{variant} {layout} {len(list(root.iterdir()))}"
        run_dir.mkdir()
        run_all([(processes, (config, run_dir))])
        return config, run_dir

    return train


def logged(run_dir):
    """Return loss and gradient norm of each step, block norms of some steps, and validation losses."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        (line["step"], key): value
        for line in lines
        for key, value in line.items()
        if key in ("loss", "grad_norm", "val_loss") or "_norm/" in key
    }


def check(one, other, tolerance):
    assert differences(weights(*one), weights(*other))[0] < tolerance
    expected = logged(one[1])
    assert sum(key == "loss" for _, key in expected) == STEPS
    assert {step for step, key in expected if key == "update_norm/model.layers.1"} == {1, 6, 12}
    assert logged(other[1]) == pytest.approx(expected, rel=tolerance)


DEFAULT = "fsdp 2 x 2"


@pytest.mark.parametrize(
    "layout", [DEFAULT, *(pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS if name != DEFAULT)]
)
def test_tensor_parallel_layouts_train_as_one_process(trained, layout):
    check(trained("adamw", None), trained("adamw", layout), 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "adamw"])
def test_tensor_parallel_optimizers_and_options_train_as_one_process(trained, variant):
    one, other = trained(variant, None), trained(variant, "fsdp 2 x 2")
    check(one, other, 2e-5 if variant.startswith("muon") else 1e-5)
    if "ema" in str(VARIANTS[variant]):
        assert differences(weights(*one, ema=True), weights(*other, ema=True))[0] < 1e-5


@pytest.mark.long
def test_tensor_parallel_amp_error_is_within_rounding(trained):
    exact, rounded = trained("adamw", None), trained("adamw", "fsdp 2 x 2", "precision=amp_bfloat16")
    alone = trained("adamw", None, "precision=amp_bfloat16")
    expected, one, found = logged(exact[1]), logged(alone[1]), logged(rounded[1])
    last = (STEPS, "loss")
    assert abs(found[last] - one[last]) < 2 * max(abs(one[last] - expected[last]), 1e-3)
    by_rounding = differences(weights(*exact), weights(*alone))[0]
    assert differences(weights(*alone), weights(*rounded))[0] < 2 * by_rounding
    assert by_rounding < 0.1


def test_tensor_parallel_ranks_count_each_sample_once(trained):
    (_, one), (_, other) = trained("adamw", None), trained("adamw", "fsdp 2 x 2")
    plans = [json.loads((run_dir / "plan.json").read_text()) for run_dir in (one, other)]
    for key in ("global_batch_size", "tokens_per_step", "total_samples", "parameters"):
        assert plans[0][key] == plans[1][key]
    assert plans[1]["accum_freq"] == 2
