"""A rehearsal detects and locates defects injected into a run."""

import pytest
from support.tiny import SMALL_LM

from foundry.rehearsal.exchange import RehearsalError

pytestmark = pytest.mark.long
WORDS = [
    *SMALL_LM,
    "data.vocab_size=512",
    "optimizer=adamw",
    "precision=amp_bf16",
    "distributed=fsdp",
    "hparams.per_gpu_batch_size=2",
    "hparams.global_batch_size=32",
    "evaluation.write_samples=false",
    "checkpoint=none",
]


@pytest.fixture(scope="module")
def sound(rehearsed):
    """The record of the rehearsed run without an injected defect."""
    return rehearsed(*WORDS, world_size=8)


def test_rehearsal_reports_a_host_wait_for_loss_item_with_its_line(rehearsed):
    record = rehearsed(*WORDS, world_size=8, before="support.defects:read_the_loss")
    (wait,) = record.waits_of(record.step)
    assert (wait.operation, wait.count) == ("aten::_local_scalar_dense", 2)
    assert wait.where.endswith("_change_loss(lambda part: part if part.loss.item() < 1e9 else None)")


def test_rehearsal_fails_on_a_host_tensor_in_a_device_operation(rehearsed):
    with pytest.raises(RehearsalError, match="FakeTensorDeviceMismatchError") as raised:
        rehearsed(*WORDS, world_size=8, before="support.defects:use_a_host_tensor")
    assert "(part.loss[None] * torch.ones(3))" in str(raised.value)


def test_rehearsal_counts_an_additional_collective(rehearsed, sound):
    record = rehearsed(*WORDS, world_size=8, before="support.defects:gather_once_more")
    counts = sound.collectives_of(sound.step)
    assert record.collectives_of(record.step) == {**counts, "all_gather": counts["all_gather"] + 1}


def test_rehearsal_lists_a_retained_unsharded_model_as_largest(rehearsed, sound):
    record = rehearsed(*WORDS, world_size=8, before="support.defects:keep_a_whole_model")
    whole = next(tensor for tensor in record.largest if "tensors.append" in tensor.where)
    assert whole.bytes == pytest.approx(8 * record.plan["weights"], rel=0.2)
    assert record.live.bytes == sound.live.bytes + 2 * whole.bytes
