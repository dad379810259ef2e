"""Runs on fake GPUs for each strategy: no avoidable host wait in a step and no superfluous collective."""

from dataclasses import dataclass

import pytest
from support.composition import configure

from foundry.config.schemas.distributed import resolve_distributed
from foundry.parallel.collective_counts import step_collectives

NUM_BLOCKS = 2
LM = [
    "debug=fast",
    "tracking.plots=false",
    "model.hidden_size=64",
    "model.qk_norm=false",
    "model.intermediate_size=128",
    f"model.num_layers={NUM_BLOCKS}",
    "model.num_heads=2",
    "model.num_kv_heads=2",
    "data.seq_len=64",
    "data.vocab_size=512",
    "precision=amp_bf16",
]


@dataclass(frozen=True)
class Case:
    """A run to rehearse.

    Attributes:
        ranks: number of ranks.
        overrides: overrides in addition to the model sizes.
        shares: number of ranks that train on the same samples.
        microbatches: microbatches per rank and step.
        owner_batches: batches of matrices that Muon gathers.
        normalizes_rows: whether Muon normalizes rows.
        replicates: whether FSDP2 replicates norms and biases.
        waits: unavoidable host waits per step.
        runs_by_default: whether the case is in the default selection.
    """

    ranks: int
    overrides: tuple[str, ...]
    shares: int = 1
    microbatches: int = 1
    owner_batches: int = 0
    normalizes_rows: bool = False
    replicates: bool = True
    waits: int = 0
    runs_by_default: bool = False

    @property
    def words(self):
        samples = self.ranks // self.shares * 2 * self.microbatches
        return [*LM, *self.overrides, "hparams.per_gpu_batch_size=2", f"hparams.global_batch_size={samples}"]


ADAMW, MUON, SGD, FSDP2 = "optimizer=adamw", "optimizer=muon", "optimizer=sgd", "distributed=fsdp"
DDP_DEFERRED = ("distributed=ddp", "distributed.overlap_grad_reduce=false")
DDP_SHARDED = ("distributed=ddp", "distributed.shard_optimizer=true")
ROWS, UNSAVED = "optimizer.row_variance=true", "checkpoint=none"
CASES = {
    "one_gpu": Case(1, (ADAMW,), runs_by_default=True),
    "fsdp_256": Case(256, (ADAMW, FSDP2), microbatches=2, runs_by_default=True),
    "fsdp_muon": Case(8, (MUON, FSDP2, UNSAVED), owner_batches=1),
    "ddp": Case(8, (ADAMW, *DDP_DEFERRED, UNSAVED)),
    "fsdp_muon_rows": Case(8, (MUON, ROWS, FSDP2, UNSAVED), owner_batches=1, normalizes_rows=True),
    "one_gpu_muon": Case(1, (MUON, UNSAVED), microbatches=2),
    "one_gpu_sgd": Case(1, (SGD, UNSAVED)),
    # The host waits for the loss, the gradient norm and the overflow flag of the scaler.
    "one_gpu_float16": Case(1, (ADAMW, UNSAVED, "precision=amp_float16"), waits=3),
    "one_gpu_checkpointed": Case(1, (ADAMW, UNSAVED, "hparams.grad_checkpointing=true"), microbatches=2),
    "one_gpu_averaged": Case(1, (ADAMW, "hparams.ema_decay=0.9")),
    # The host waits for the loss, to compute its z-score, and for the gradient norm.
    "one_gpu_spikes": Case(1, (ADAMW, UNSAVED, "guard.spike_zscore=5"), waits=2),
    "fsdp_last": Case(8, (ADAMW, FSDP2, UNSAVED, "distributed.gradient_sync=last"), microbatches=2),
    "fsdp_kept": Case(8, (ADAMW, FSDP2, UNSAVED, "distributed.gradient_sync=last_keep_params"), microbatches=2),
    "fsdp_unfreed": Case(8, (ADAMW, FSDP2, UNSAVED, "distributed.reshard_after_forward=false"), microbatches=2),
    "fsdp_checkpointed": Case(8, (ADAMW, FSDP2, UNSAVED, "hparams.grad_checkpointing=true"), microbatches=2),
    "fsdp_pure_bf16": Case(8, (ADAMW, FSDP2, UNSAVED, "precision=pure_bf16"), replicates=False),
    "fsdp_muon_256": Case(256, (MUON, FSDP2, UNSAVED), owner_batches=1),
    "fsdp_sgd": Case(8, (SGD, FSDP2, UNSAVED)),
    "hsdp": Case(8, (ADAMW, "distributed=hsdp", UNSAVED), microbatches=2),
    "hsdp_256": Case(256, (ADAMW, "distributed=hsdp", "distributed.num_replicas=32"), microbatches=2),
    "tensor_parallel": Case(8, (ADAMW, FSDP2, UNSAVED, "distributed.tensor_parallel=2"), shares=2, microbatches=2),
    "tensor_parallel_256": Case(256, (MUON, FSDP2, "distributed.tensor_parallel=2"), shares=2, owner_batches=1),
    "ddp_every": Case(8, (ADAMW, *DDP_DEFERRED, UNSAVED, "distributed.gradient_sync=every"), microbatches=2),
    "ddp_256": Case(256, (ADAMW, *DDP_DEFERRED, UNSAVED)),
    "ddp_sharded": Case(8, (ADAMW, *DDP_SHARDED), microbatches=2),
    "ddp_sharded_whole": Case(8, (ADAMW, *DDP_SHARDED, UNSAVED, "distributed.overlap_grad_reduce=false")),
    "ddp_sharded_256": Case(256, (ADAMW, *DDP_SHARDED, "distributed.overlap_param_gather=true", UNSAVED)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if case.runs_by_default else pytest.mark.long) for name, case in CASES.items()]
)
def test_step_has_no_host_waits_and_only_the_expected_collectives(rehearsed, name):
    case = CASES[name]
    record = rehearsed(*case.words, world_size=case.ranks)
    assert (record.result["status"], record.result["step"]) == ("finished", 2)
    waits = record.waits_of(record.step)
    assert sum(wait.count for wait in waits) == case.waits, "\n".join(map(str, waits))
    config = configure(*case.words, f"distributed.nproc_per_node={case.ranks}")
    strategy = resolve_distributed(config.distributed, case.ranks)
    assert record.collectives_of(record.step) == step_collectives(
        strategy,
        num_blocks=NUM_BLOCKS,
        num_microbatches=case.microbatches,
        num_owner_batches=case.owner_batches,
        normalizes_rows=case.normalizes_rows,
        has_replicated=case.replicates,
    )
    is_one_unit = "distributed.overlap_grad_reduce=false" in case.overrides
    if "shard" in strategy.mesh_shape(case.ranks) and not is_one_unit:
        num_weights = record.plan["weights"] * strategy.mesh_shape(case.ranks)["shard"]
        assert record.largest[0].bytes < num_weights, record.largest[0]
