"""Rehearsed peak memory of a step against the plan, and of building a sharded model against its size."""

import pytest

from foundry.training.trainer import CHECKING

pytestmark = pytest.mark.long
WORDS = [
    "debug=fast",
    "tracking.plots=false",
    "model.hidden_size=512",
    "model.qk_norm=false",
    "model.intermediate_size=1408",
    "model.num_layers=4",
    "model.num_heads=8",
    "model.num_kv_heads=8",
    "data.seq_len=256",
    "checkpoint=none",
    "precision=amp_bf16",
    "evaluation.write_samples=false",
    "hparams.per_gpu_batch_size=4",
]
FSDP2 = ["optimizer=adamw", "distributed=fsdp"]
CASES = {
    "one_gpu": (1, ["optimizer=adamw"]),
    "one_gpu_muon": (1, ["optimizer=muon"]),
    "one_gpu_checkpointed": (1, ["optimizer=adamw", "hparams.grad_checkpointing=true"]),
    "bf16_moments": (1, ["optimizer=adamw", "optimizer.moments_dtype=bf16", "optimizer.beta2=0.95"]),
    "fsdp": (8, FSDP2),
    "fsdp_256": (256, FSDP2),
    "fsdp_last": (8, [*FSDP2, "distributed.gradient_sync=last"]),
    "fsdp_kept": (8, [*FSDP2, "distributed.gradient_sync=last_keep_params"]),
    "fsdp_checkpointed": (8, [*FSDP2, "hparams.grad_checkpointing=true"]),
    "fsdp_offloaded": (8, [*FSDP2, "distributed.cpu_offload=true"]),
    "hsdp": (8, ["optimizer=adamw", "distributed=hsdp"]),
    "tensor_parallel": (8, [*FSDP2, "distributed.tensor_parallel=2"]),
    "ddp": (8, ["optimizer=adamw", "distributed=ddp", "distributed.overlap_grad_reduce=false"]),
    "ddp_sharded": (8, ["optimizer=adamw", "distributed=ddp", "distributed.shard_optimizer=true"]),
}


@pytest.mark.parametrize("name", CASES)
def test_rehearsed_peak_of_a_step_is_within_5_percent_of_the_plan(rehearsed, name):
    ranks, words = CASES[name]
    shares = 2 if "distributed.tensor_parallel=2" in words else 1
    record = rehearsed(*WORDS, *words, f"hparams.global_batch_size={8 * ranks // shares}", world_size=ranks)
    peak = record.peak_of(record.step)
    assert peak.bytes == pytest.approx(record.plan["total"], rel=0.05), (dict(peak.parts), dict(record.plan))


@pytest.mark.parametrize("name", CASES)
def test_first_step_check_has_peak_and_collectives_of_a_step(rehearsed, name):
    ranks, words = CASES[name]
    shares = 2 if "distributed.tensor_parallel=2" in words else 1
    record = rehearsed(*WORDS, *words, f"hparams.global_batch_size={8 * ranks // shares}", world_size=ranks)
    assert record.peak_of(CHECKING).bytes == pytest.approx(record.peak_of(record.step).bytes, rel=0.01)
    kinds = ("all_gather", "reduce_scatter")
    checked, trained = (record.collectives_of(phase) for phase in (CHECKING, record.step))
    assert [checked.get(kind) for kind in kinds] == [trained.get(kind) for kind in kinds]


@pytest.mark.parametrize("strategy", [["distributed=fsdp"], ["distributed=ddp", "distributed.shard_optimizer=true"]])
def test_sharded_model_is_never_whole_during_construction(rehearsed, strategy):
    words = [*WORDS, *strategy, "optimizer=adamw", "model.num_layers=8", "hparams.global_batch_size=32"]
    record = rehearsed(*words, world_size=8)
    shard = record.plan["weights"]
    assert record.peak_of("starting").bytes < 0.6 * 8 * shard
