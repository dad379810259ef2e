"""Packed rows on fake GPUs: one kernel per layer, no tokens x tokens tensor, no host wait."""

import pytest

LAYERS, TOKENS = 2, 2048
SIZES = [
    "data=arithmetic",
    "objective=sft",
    "data.packing=true",
    "optimizer=adamw",
    "precision=amp_bf16",
    "tracking=none",
    "checkpoint=none",
    "evaluation.write_samples=false",
    "model.hidden_size=64",
    "model.intermediate_size=128",
    f"model.num_layers={LAYERS}",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "hparams.per_gpu_batch_size=1",
]


def packed(rehearsed, tokens, *overrides):
    """Rehearse a run with one row of about `tokens` tokens per step, about 70 per document."""
    samples = f"hparams.global_batch_size={tokens // 70 - tokens // 700}"
    return rehearsed(*SIZES, f"data.seq_len={tokens}", samples, *overrides, world_size=1)


def kernels(found):
    steps = [call for call in found.attention if call.phase.startswith("step ")]
    return {
        (call.phase, call.kernel): sum(c.count for c in steps if (c.phase, c.kernel) == (call.phase, call.kernel))
        for call in steps
    }


@pytest.mark.long
def test_packed_step_runs_one_kernel_per_layer_without_host_waits(rehearsed):
    found = packed(rehearsed, TOKENS)
    assert kernels(found) == {("step 1", "varlen"): LAYERS, ("step 2", "varlen"): LAYERS}
    assert [wait for wait in found.host_waits if wait.phase.startswith("step ")] == []
    rows = [large.shape for large in found.largest if large.phase.startswith("step ")]
    assert rows
    assert not any(len(shape) > 1 and shape[-1] == shape[-2] for shape in rows)


@pytest.mark.long
@pytest.mark.parametrize(("policy", "calls"), [("full", 2 * LAYERS), ("selective", LAYERS)])
def test_selective_checkpointing_does_not_rerun_the_varlen_kernel(rehearsed, policy, calls):
    checkpointing = ["hparams.grad_checkpointing=true", f"hparams.grad_checkpointing_policy={policy}"]
    found = packed(rehearsed, TOKENS, *checkpointing)
    assert kernels(found) == {("step 1", "varlen"): calls, ("step 2", "varlen"): calls}


@pytest.mark.long
def test_memory_of_a_packed_step_is_linear_in_row_length(rehearsed):
    def activations(tokens):
        found = packed(rehearsed, tokens)
        peak = next(peak for peak in found.peaks if peak.phase == "step 2")
        return peak.bytes - found.live.bytes

    assert activations(4 * TOKENS) < 4.4 * activations(TOKENS)


@pytest.mark.long
def test_packing_in_fp32_uses_the_math_kernel(rehearsed):
    found = packed(rehearsed, TOKENS, "precision=fp32")
    assert {kernel for _, kernel in kernels(found)} == {"math"}
