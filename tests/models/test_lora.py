import pytest
import torch
from torch import nn

from foundry.config.schemas.peft import LoRA
from foundry.config.schemas.precision import PrecisionMode
from foundry.core.errors import ConfigError
from foundry.models.dit import DiT
from foundry.models.lora import (
    adapted_layers,
    adapters_off,
    add_adapters,
    frozen_matrices,
    match_targets,
    merge_adapters,
    merged,
    resolve_targets,
    scaling,
)
from foundry.models.pretrained.huggingface import HuggingFaceCausalLM
from foundry.models.transformer import Transformer
from foundry.parallel.precision import PrecisionPolicy

NAMES = [
    f"layers.{layer}.{part}"
    for layer in (0, 1, 10)
    for part in ("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj", "mlp.up_proj")
] + ["lm_head"]
MEGATRON = {"linear_qkv": ("q_proj", "k_proj", "v_proj"), "linear_proj": ("o_proj",)}


def test_lora_target_matches_a_last_part_or_a_wildcard_of_the_whole_name():
    assert match_targets(NAMES, ["o_proj"]) == [f"layers.{n}.attention.o_proj" for n in (0, 1, 10)]
    assert match_targets(NAMES, ["*_proj"]) == NAMES[:-1]
    assert match_targets(NAMES, ["*.1.*.q_proj"]) == ["layers.1.attention.q_proj"]
    assert match_targets(NAMES, ["attention.q_proj", "proj"]) == []


def test_lora_aliases_match_alone_and_within_patterns():
    assert match_targets(NAMES, ["linear_proj"], MEGATRON) == match_targets(NAMES, ["o_proj"])
    first = [f"layers.0.attention.{leaf}" for leaf in MEGATRON["linear_qkv"]]
    assert match_targets(NAMES, ["layers.0.*.linear_qkv"], MEGATRON) == first
    fused = ["layers.0.linear_qkv"]
    assert match_targets(fused, ["linear_qkv"], MEGATRON) == fused, "a layer that has the name itself"


def test_each_lora_target_is_listed_once_in_model_order():
    assert match_targets(NAMES, ["up_proj", "*.0.*", "q_proj"]) == [
        name for name in NAMES if ".0." in name or name.endswith(("q_proj", "up_proj"))
    ]


@pytest.mark.parametrize("rslora", [False, True])
def test_merged_lora_weight_computes_base_plus_adapter(rslora):
    generator = torch.Generator().manual_seed(0)
    weight, a, b, x = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((6, 5), (4, 5), (6, 4), (3, 5))
    )
    both = x @ weight.T + scaling(16, 4, rslora=rslora) * (x @ a.T) @ b.T
    torch.testing.assert_close(x @ merged(weight, a, b, alpha=16, rslora=rslora).T, both)


def test_lora_update_of_a_bf16_weight_is_rounded_once():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((64, 64), generator=generator).bfloat16()
    a, b = torch.randn((8, 64), generator=generator), 1e-4 * torch.randn((64, 8), generator=generator)
    ours = merged(weight, a, b, alpha=16)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, (weight.float() + 2 * b @ a).bfloat16())
    wide = merged(weight.float(), a, b, alpha=16)
    assert (wide - weight.float()).norm() > 0


def test_merging_a_new_adapter_changes_nothing():
    weight, a = torch.randn(6, 5), torch.randn(4, 5)
    assert torch.equal(merged(weight, a, torch.zeros(6, 4), alpha=16), weight)


def transformer():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}
    return Transformer(vocab_size=64, max_seq_len=16, **sizes)


def gpt2():
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return HuggingFaceCausalLM(path=None, architecture="gpt2", config=sizes, vocab_size=64, max_seq_len=16)


def dit():
    torch.manual_seed(0)
    return DiT(image_size=8, num_channels=1, num_classes=10, hidden_size=32, num_layers=2, num_heads=2)


def trained(model, **settings):
    """Add adapters with nonzero weights to a model and return the model."""
    add_adapters(model, LoRA(**settings), seed=0)
    for layer in adapted_layers(model).values():
        nn.init.normal_(layer.lora_B.default.weight, std=0.1)
    return model


TOKENS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))


def log_prob(model):
    return model(TOKENS, TOKENS).log_prob


@pytest.mark.parametrize(
    ("build", "patterns", "found"),
    [
        (transformer, ["linear_qkv"], [f"model.layers.{{}}.self_attn.{x}_proj" for x in "qkv"]),
        (transformer, ["*.1.*o_proj", "*.0.*o_proj"], ["model.layers.{}.self_attn.o_proj"]),
        (
            gpt2,
            ["linear_qkv", "*.mlp.c_proj"],
            [f"causal_lm.transformer.h.{{}}.{x}" for x in ("attn.c_attn", "mlp.c_proj")],
        ),
        (dit, ["linear_qkv", "linear_fc1"], ["blocks.{}.attention.qkv", "blocks.{}.mlp.fc1"]),
    ],
)
def test_lora_patterns_and_megatron_names_select_layers_of_blocks(build, patterns, found):
    assert resolve_targets(build(), patterns) == [name.format(layer) for layer in (0, 1) for name in found]


ATTENTION = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
REFUSED = {
    "mixtral": (["q_proj"], {**ATTENTION, "num_local_experts": 2}),
    "olmoe": (["*_proj"], {**ATTENTION, "num_experts": 2, "num_experts_per_tok": 2}),
    "granitemoe": (["*_proj"], {**ATTENTION, "num_local_experts": 2}),
    "mamba": (["*_proj"], {"hidden_size": 32, "state_size": 8}),
    "mamba2": (["out_proj"], {"hidden_size": 32, "state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1}),
    "falcon_mamba": (["in_proj", "out_proj"], {"hidden_size": 32, "state_size": 8}),
}


@pytest.mark.parametrize("architecture", REFUSED)
def test_layers_unsupported_by_peft_are_a_config_error(architecture):
    patterns, sizes = REFUSED[architecture]
    sizes = {**sizes, "num_hidden_layers": 1}
    model = HuggingFaceCausalLM(path=None, architecture=architecture, config=sizes, vocab_size=64, max_seq_len=16)
    with pytest.raises(ConfigError, match=r"^peft\.target_modules: chooses .*_proj x 1") as refused:
        add_adapters(model, LoRA(target_modules=patterns), seed=0)
    assert "to which peft cannot add adapters: " in str(refused.value)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("build", "patterns", "message"),
    [
        (
            dit,
            ["out", "*_proj"],
            "*_proj, which matches no linear layer of DiT; available: patch_embedder, fc1, fc2, mod",
        ),
        (
            transformer,
            ["c_attn"],
            "c_attn, which matches no linear layer of Transformer; available: q_proj, k_proj, v_pr",
        ),
        (
            transformer,
            ["*"],
            "*, which matches lm_head, whose matrix is used without calling the layer; name the layers",
        ),
    ],
)
def test_lora_pattern_without_match_or_on_the_head_is_a_config_error(build, patterns, message):
    with pytest.raises(ConfigError) as refused:
        resolve_targets(build(), patterns)
    assert str(refused.value).startswith(f"peft.target_modules: has {message}")


@pytest.mark.parametrize(("build", "targets"), [(transformer, ["*_proj"]), (gpt2, ["linear_qkv", "*.mlp.c_proj"])])
def test_adapters_change_nothing_at_first_and_can_be_merged(build, targets):
    base, model = build(), build()
    assert list(adapted_layers(model)) == []
    names = add_adapters(model, LoRA(target_modules=targets), seed=0)
    assert list(adapted_layers(model)) == names
    assert {name.split(".")[-3] for name, p in model.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}
    assert torch.equal(log_prob(model), log_prob(base))
    model = trained(build(), target_modules=targets)
    ours = log_prob(model)
    assert (ours - log_prob(base)).abs().max() > 0.01
    merge_adapters(model)
    assert list(model.state_dict()) == list(base.state_dict())
    torch.testing.assert_close(log_prob(model), ours, atol=1e-5, rtol=1e-5)


def test_adapters_have_the_configured_rank_and_scale():
    model, base = trained(transformer(), adapter_dim=4, alpha=2), transformer()
    for name, layer in adapted_layers(model).items():
        a, b = layer.lora_A.default.weight, layer.lora_B.default.weight
        assert len(a) == 4
        torch.testing.assert_close(layer.get_delta_weight("default"), 2 / 4 * b @ a)
        assert torch.equal(layer.base_layer.weight, base.get_submodule(name).weight)


def test_adapter_dropout_applies_to_adapters_and_in_training_only():
    exact, model = trained(transformer()), trained(transformer(), adapter_dropout=0.5)
    torch.manual_seed(0)
    one, other = log_prob(model), log_prob(model)
    assert not torch.equal(one, other)
    assert torch.equal(log_prob(exact), log_prob(exact))
    with adapters_off(model):
        assert torch.equal(log_prob(model), log_prob(transformer()))
    assert torch.equal(log_prob(model.eval()), log_prob(exact.eval()))


def test_adapters_off_matches_the_base_and_keeps_requires_grad():
    """`adapters_off` sets the private attribute `_disable_adapters` of peft: this test fails if peft renames it."""
    model, base = trained(transformer()), transformer()
    trainable = [parameter.requires_grad for parameter in model.parameters()]
    before = log_prob(model)
    with adapters_off(model):
        with adapters_off(model):
            assert torch.equal(log_prob(model), log_prob(base))
        assert torch.equal(log_prob(model), log_prob(base))
        assert [parameter.requires_grad for parameter in model.parameters()] == trainable
    assert torch.equal(log_prob(model), before)
    with pytest.raises(RuntimeError, match="on purpose"), adapters_off(model):
        raise RuntimeError("on purpose")
    assert torch.equal(log_prob(model), before)


def test_adapter_init_depends_on_the_seed_and_keeps_the_rng_state():
    def drawn(seed, noise):
        model = transformer()
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        add_adapters(model, LoRA(), seed)
        assert torch.equal(torch.get_rng_state(), before)
        return torch.cat([p.flatten() for p in model.parameters() if p.requires_grad])

    assert torch.equal(drawn(1, 0), drawn(1, 5))
    assert not torch.equal(drawn(1, 0), drawn(2, 0))


@pytest.mark.parametrize("build", [transformer, gpt2])
@pytest.mark.parametrize("mode", [PrecisionMode.amp_bfloat16, PrecisionMode.amp_float16])
def test_frozen_matrices_in_compute_dtype_change_no_bit_under_amp(build, mode):
    policy, found = PrecisionPolicy(mode), []
    for is_narrow in (False, True):
        model = trained(build(), target_modules=["linear_qkv"])
        model = policy.prepare(model, frozen_matrices(model) if is_narrow else ())
        with policy.autocast(torch.device("cpu")):
            loss = log_prob(model)
        loss.sum().backward()
        found.append([loss, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.float32, policy.compute_dtype}
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert len(found[0]) > 4
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_diffusion_model_trains_and_merges_adapters():
    model = trained(dit(), target_modules=["linear_qkv", "modulation", "timestep_embedder.*"])
    images, steps, labels = torch.randn(2, 1, 8, 8), torch.tensor([3, 5]), torch.tensor([0, 1])
    ours = model(images, steps, labels)
    ours.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    merge_adapters(model)
    torch.testing.assert_close(model(images, steps, labels), ours, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("build", [transformer, gpt2, dit])
def test_lora_flops_count_four_per_frozen_and_six_per_adapter_weight(build):
    def flops(model):
        return model.flops_per_sample(*(() if build is dit else (16,)))

    base, model = build(), build()
    add_adapters(model, LoRA(target_modules=["linear_qkv"]), seed=0)
    assert 2 / 3 < flops(model) / flops(base) < 0.95
    if build is transformer:
        frozen = sum(p.numel() for p in base.parameters() if p.ndim == 2) - 64 * 32
        adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert flops(model) == flops(base) - 16 * (2 * frozen - 6 * adapters)
