import pytest
import torch

from foundry.models.lora import match_targets, merged, scaling

NAMES = [
    f"layers.{layer}.{part}"
    for layer in (0, 1, 10)
    for part in ("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj", "mlp.up_proj")
] + ["lm_head"]
MEGATRON = {"linear_qkv": ("q_proj", "k_proj", "v_proj"), "linear_proj": ("o_proj",)}


def test_a_last_part_or_wildcards_for_the_whole_name_choose_a_layer():
    assert match_targets(NAMES, ["o_proj"]) == [f"layers.{n}.attention.o_proj" for n in (0, 1, 10)]
    assert match_targets(NAMES, ["*_proj"]) == NAMES[:-1]
    assert match_targets(NAMES, ["*.1.*.q_proj"]) == ["layers.1.attention.q_proj"]
    assert match_targets(NAMES, ["attention.q_proj", "proj"]) == []


def test_other_names_stand_for_layers_alone_and_within_patterns():
    assert match_targets(NAMES, ["linear_proj"], MEGATRON) == match_targets(NAMES, ["o_proj"])
    first = [f"layers.0.attention.{leaf}" for leaf in MEGATRON["linear_qkv"]]
    assert match_targets(NAMES, ["layers.0.*.linear_qkv"], MEGATRON) == first
    fused = ["layers.0.linear_qkv"]
    assert match_targets(fused, ["linear_qkv"], MEGATRON) == fused, "a layer that has the name itself"


def test_a_layer_is_named_once_in_the_models_order():
    assert match_targets(NAMES, ["up_proj", "*.0.*", "q_proj"]) == [
        name for name in NAMES if ".0." in name or name.endswith(("q_proj", "up_proj"))
    ]


@pytest.mark.parametrize("rslora", [False, True])
def test_a_merged_layer_computes_what_both_do(rslora):
    generator = torch.Generator().manual_seed(0)
    weight, a, b, x = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((6, 5), (4, 5), (6, 4), (3, 5))
    )
    both = x @ weight.T + scaling(16, 4, rslora=rslora) * (x @ a.T) @ b.T
    torch.testing.assert_close(x @ merged(weight, a, b, alpha=16, rslora=rslora).T, both)


def test_a_small_update_of_a_bfloat16_layer_is_rounded_once():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((64, 64), generator=generator).bfloat16()
    a, b = torch.randn((8, 64), generator=generator), 1e-4 * torch.randn((64, 8), generator=generator)
    ours = merged(weight, a, b, alpha=16)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, (weight.float() + 2 * b @ a).bfloat16())
    wide = merged(weight.float(), a, b, alpha=16)
    assert (wide - weight.float()).norm() > 0


def test_a_new_adapter_changes_nothing():
    weight, a = torch.randn(6, 5), torch.randn(4, 5)
    assert torch.equal(merged(weight, a, torch.zeros(6, 4), alpha=16), weight)
