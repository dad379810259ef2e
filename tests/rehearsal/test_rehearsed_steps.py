"""Whole runs on fake GPUs, strategy by strategy: no wait for the device in a step, and no collective too many."""

from dataclasses import dataclass

import pytest
from support.composition import configure

from foundry.config.schemas.distributed import DDP, FSDP, resolve_distributed
from foundry.parallel.collective_counts import step_collectives

NUM_BLOCKS = 2
LM = [
    "debug=fast",
    "tracking.plots=false",
    "model.hidden_size=64",
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
        ranks: number of them.
        overrides: beside those of the model.
        shares: ranks that share their samples.
        microbatches: of each rank in a step.
        owner_batches: batches of matrices that Muon brings together.
        waits: inherent host waits of a step.
        runs_by_default: whether the case is in the default selection.
    """

    ranks: int
    overrides: tuple[str, ...]
    shares: int = 1
    microbatches: int = 1
    owner_batches: int = 0
    waits: int = 0
    runs_by_default: bool = False

    @property
    def words(self):
        samples = self.ranks // self.shares * 2 * self.microbatches
        return [*LM, *self.overrides, "hparams.per_gpu_batch_size=2", f"hparams.global_batch_size={samples}"]


ADAMW, MUON, SGD, FSDP2 = "optimizer=adamw", "optimizer=muon", "optimizer=sgd", "distributed=fsdp"
CASES = {
    "one_gpu": Case(1, (ADAMW,), microbatches=2, runs_by_default=True),
    "fsdp_256": Case(256, (ADAMW, FSDP2), microbatches=2, runs_by_default=True),
    "fsdp_muon": Case(8, (MUON, FSDP2, "checkpoint=none"), owner_batches=1, runs_by_default=True),
    "ddp": Case(
        8, (ADAMW, "distributed=ddp", "distributed.overlap_grad_reduce=false", "checkpoint=none"), runs_by_default=True
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if case.runs_by_default else pytest.mark.long) for name, case in CASES.items()]
)
def test_a_step_waits_for_nothing_and_sends_what_its_strategy_costs(rehearsed, name):
    case = CASES[name]
    record = rehearsed(*case.words, world_size=case.ranks)
    assert record.result["status"] == "finished"
    waits = record.waits_of(record.step)
    assert sum(wait.count for wait in waits) == case.waits, "\n".join(map(str, waits))
    strategy = resolve_distributed(
        configure(*case.words, f"distributed.nproc_per_node={case.ranks}").distributed, case.ranks
    )
    expected = step_collectives(
        strategy, num_blocks=NUM_BLOCKS, num_microbatches=case.microbatches, num_owner_batches=case.owner_batches
    )
    assert record.collectives_of(record.step) == expected
    if isinstance(strategy, FSDP) or (isinstance(strategy, DDP) and strategy.shard_optimizer):
        assert_sharded(record)


def assert_sharded(record):
    """No tensor of the device has the size of the model, and no step holds as much of it in whole tensors."""
    whole = record.plan["weights"] * record.world_size
    assert record.largest[0].bytes < whole
