"""Maximal update parametrization: initial values and learning rates by role, and updates independent of the width."""

import math
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foundry.config.schemas.model import Parametrization
from foundry.models.dit import DiT
from foundry.models.keyed_draws import Uniform
from foundry.models.parametrization import Role, UpdateRule, WidthRules
from foundry.models.token_loss import TokenLoss
from foundry.models.transformer import Transformer
from foundry.optim.optimizers import adamw, muon, param_groups
from foundry.tasks.robots.models.policy_dit import PolicyDiT
from foundry.training.step import set_schedule

MUP = Parametrization.mup
BASE = 256
HEAD_DIM = 16
# Table 3 of Tensor Programs V for AdamW, and the spectral condition for Muon: powers of width / base width.
POWERS = {
    "input": {"initial": 0.0, "adamw": 0.0, "muon": 0.0},
    "hidden": {"initial": -0.5, "adamw": -1.0, "muon": -0.5},
    "output": {"initial": -1.0, "adamw": -1.0, "muon": -1.0},
    "vector": {"initial": 0.0, "adamw": 0.0, "muon": 0.0},
}
DECODER_ROLES = {
    "model.embed_tokens.weight": "input",
    "model.value_embeddings.0.table.weight": "input",
    **{f"model.layers.0.self_attn.{name}_proj.weight": "hidden" for name in "qkvo"},
    **{f"model.layers.0.mlp.{name}_proj.weight": "hidden" for name in ("gate", "up", "down")},
    "model.layers.0.input_layernorm.weight": "vector",
    "model.layers.0.residual_scale": "vector",
    "model.norm.weight": "vector",
    "lm_head.weight": "output",
}
DIT_ROLES = {
    "patch_embedder.weight": "input",
    "patch_embedder.bias": "vector",
    "timestep_embedder.fc1.weight": "input",
    "timestep_embedder.fc2.weight": "hidden",
    "label_embedder.weight": "input",
    "blocks.0.modulation.weight": "hidden",
    "blocks.0.attention.qkv.weight": "hidden",
    "blocks.0.mlp.fc2.weight": "hidden",
    "blocks.0.mlp.fc2.bias": "vector",
    "final_layer.modulation.weight": "hidden",
    "final_layer.out.weight": "output",
}


def decoder(width, **changes):
    torch.manual_seed(0)
    heads = width // HEAD_DIM
    sizes = {"vocab_size": 40, "num_layers": 1, "max_seq_len": 16, "intermediate_size": 2 * width}
    return Transformer(hidden_size=width, num_heads=heads, num_kv_heads=heads, **{**sizes, **changes})


def dit(width, **changes):
    torch.manual_seed(0)
    sizes = {"image_size": 8, "num_channels": 3, "num_classes": 10, "num_layers": 1, "num_heads": width // HEAD_DIM}
    return DiT(hidden_size=width, **sizes, **changes)


def policy(width, **changes):
    sizes = {"state_dim": 3, "action_dim": 2, "num_observations": 1, "horizon": 8, "image_size": 16, "num_layers": 1}
    return PolicyDiT(hidden_size=width, num_heads=width // HEAD_DIM, **sizes, **changes)


@cache
def on_meta(make, width, **changes):
    with torch.device("meta"):
        return make(width, parametrization=MUP, base_width=BASE, **changes)


def rates(model, optimizer, **settings):
    """Return the factors on learning rate and weight decay by parameter name."""
    groups = [group for part in optimizer(model=model, lr=1.0, **settings) for group in part.param_groups]
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[p]: (group["lr_mult"], group["wd_mult"]) for group in groups for p in group["params"]}


CASES = [
    (decoder, DECODER_ROLES, {"residual_scalars": True, "value_embeddings": (0,)}),
    (dit, DIT_ROLES, {}),
]


@pytest.mark.parametrize(("make", "roles", "options"), CASES, ids=["decoder", "dit"])
@pytest.mark.parametrize("width", [64, 256, 1024])
def test_rates_follow_the_tables_and_their_product_with_weight_decay_is_constant(make, roles, options, width):
    model = on_meta(make, width, **options)
    found, of_muon = rates(model, adamw), rates(model, muon)
    for name, role in roles.items():
        is_matrix_of_block = role == "hidden" and (".layers." in name or name.startswith("blocks."))
        factor = (width / BASE) ** POWERS[role]["adamw"]
        with_muon = (width / BASE) ** POWERS[role]["muon" if is_matrix_of_block else "adamw"]
        assert found[name][0] == pytest.approx(factor), name
        assert of_muon[name][0] == pytest.approx(with_muon), name
        for rate, decay in (found[name], of_muon[name]):
            assert rate * decay == pytest.approx(0.0 if role == "vector" else 1.0), name


@pytest.mark.parametrize("width", [64, 256, 1024])
def test_initial_std_of_the_decoder_follows_the_table(width):
    draws = on_meta(decoder, width, residual_scalars=True, value_embeddings=(0,)).initial_weights()
    base = on_meta(decoder, BASE, residual_scalars=True, value_embeddings=(0,)).initial_weights()
    for name, role in DECODER_ROLES.items():
        factor = (width / BASE) ** POWERS[role]["initial"]
        if role == "vector":
            assert draws[name] == base[name]
        else:
            assert draws[name].std == pytest.approx(base[name].std * factor), name


@pytest.mark.parametrize("width", [64, 256, 1024])
def test_initial_bounds_of_dit_are_those_of_the_base_width_times_the_factor_of_the_table(width):
    draws = on_meta(dit, width).initial_weights()
    # Numbers of inputs and outputs at the base width, which determine the bound.
    fans = {
        "patch_embedder.weight": (12, BASE),
        "timestep_embedder.fc1.weight": (256, BASE),
        "timestep_embedder.fc2.weight": (BASE, BASE),
        "blocks.0.attention.qkv.weight": (BASE, 3 * BASE),
        "blocks.0.mlp.fc2.weight": (4 * BASE, BASE),
    }
    for name, (fan_in, fan_out) in fans.items():
        factor = (width / BASE) ** POWERS[DIT_ROLES[name]]["initial"]
        assert draws[name].bound == pytest.approx(math.sqrt(6 / (fan_in + fan_out)) * factor), name
    assert draws["label_embedder.weight"].std == 0.5


def test_sampled_weights_have_the_std_of_the_table():
    model = decoder(4 * 64, parametrization=MUP, base_width=64, init_std="small")
    std = math.sqrt(2 / (5 * 64))  # the rule is evaluated at the base width
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(std, rel=0.02)
    assert model.model.layers[0].self_attn.q_proj.weight.std().item() == pytest.approx(std / 2, rel=0.02)
    assert model.lm_head.weight.std().item() == pytest.approx(std / 4, rel=0.02)


def test_roles_of_the_robot_policy():
    model = on_meta(policy, 512)
    found = rates(model, adamw)
    inputs = ("action_embedder.weight", "observation_embedder.0.weight", "picture_encoder.conv3.weight")
    hidden = ("observation_embedder.2.weight", "timestep_embedder.fc2.weight", "final_layer.out.weight")
    assert [found[name][0] for name in (*inputs, *hidden)] == [1.0] * 3 + [0.5] * 3
    fans = 3 + 64, 2 * BASE
    assert model.initial_weights()["observation_embedder.0.weight"] == Uniform.xavier(*fans)


@pytest.mark.parametrize("optimizer", [adamw, muon])
@pytest.mark.parametrize("make", [decoder, dit])
def test_model_of_the_base_width_trains_bit_for_bit_as_with_the_standard_parametrization(make, optimizer):
    models = [make(48), make(48, parametrization=MUP, base_width=48)]
    for model in models:
        parts = optimizer(model=model, lr=1e-2)
        set_schedule(parts, 1e-2)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            for part in parts:
                part.step()
    first, other = (dict(model.named_parameters()) for model in models)
    assert first.keys() == other.keys()
    assert all(torch.equal(first[name], other[name]) for name in first)


@given(st.floats(1e-3, 1e3), st.sampled_from(Role), st.sampled_from(UpdateRule))
def test_spectral_norms_of_initial_values_and_updates_meet_the_spectral_condition(ratio, role, update):
    """With sizes n_in and n_out, both norms must be proportional to sqrt(n_out / n_in)."""
    rules = WidthRules(ratio, {"weight": role})
    fan_in = ratio if role in (Role.hidden, Role.output) else 1.0
    fan_out = ratio if role in (Role.hidden, Role.input) else 1.0
    if role is Role.vector:
        assert rules.initial_factor("weight") == rules.lr_factor("weight", update) == 1.0
        return
    expected = math.sqrt(fan_out / fan_in)
    # An update of Adam has elements of one size and a low rank. Singular values of Muon's update are proportional to
    # the root of the larger size, which grows with the width in every role.
    size = math.sqrt(fan_in * fan_out) if update is UpdateRule.adam else math.sqrt(ratio)
    assert rules.lr_factor("weight", update) * size == pytest.approx(expected)
    # A random matrix with elements of size s has a spectral norm near s (sqrt(n_in) + sqrt(n_out)); the table has a
    # smaller output, whose norm vanishes at infinite width (Tensor Programs V, section 5).
    if role is not Role.output:
        assert rules.initial_factor("weight") * math.sqrt(ratio) == pytest.approx(expected)
    assert rules.lr_factor("other", update) == 1.0


def test_factors_of_parameter_groups_multiply_those_of_the_width():
    outputs = {"match": "o_proj", "lr_mult": 2.0, "wd_mult": 5}
    groups = {"embeddings": {"lr_mult": 3.0}, "patterns": {"outputs": outputs}}
    model = on_meta(decoder, 512)
    names = {p: name for name, p in model.named_parameters()}
    found = {names[p]: g for g in param_groups(model, 0.1, groups, update=UpdateRule.muon) for p in g["params"]}
    assert found["model.embed_tokens.weight"]["lr_mult"] == 3.0
    output = found["model.layers.0.self_attn.o_proj.weight"]
    assert (output["lr_mult"], output["wd_mult"]) == pytest.approx((2 / math.sqrt(2), 5 * math.sqrt(2)))
    assert output["weight_decay"] == pytest.approx(0.1 * 5 * math.sqrt(2))


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_computes_the_logits_of_an_export(tied):
    from transformers import LlamaForCausalLM

    model = decoder(64, parametrization=MUP, base_width=16, tie_embeddings=tied).eval()
    tokens = torch.arange(24).view(2, 12)
    exported = LlamaForCausalLM(model.hf_config()).eval()
    exported.load_state_dict(model.export_state(model.state_dict()), strict=not tied)
    with torch.no_grad():
        logits = model(tokens, return_logits=True).logits
        assert logits.abs().mean() > 1e-4
        torch.testing.assert_close(exported(tokens).logits, logits, rtol=1e-4, atol=1e-6)


def slope(optimizer, parametrization, **changes):
    """Return the slope of log(mean absolute change of the logits in three steps) over log(width)."""
    widths, sizes = (64, 128, 256), []
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(40, (16, 9), generator=generator)
    for width in widths:
        base = {} if parametrization is Parametrization.standard else {"base_width": 64}
        model = decoder(width, parametrization=parametrization, **base, **changes)
        before = model(tokens[:, :-1], return_logits=True).logits
        parts = optimizer(model=model, lr=1e-2)
        set_schedule(parts, 1e-2)
        for _ in range(3):
            model(tokens[:, :-1], tokens[:, 1:], token_loss=TokenLoss()).loss.div(128).backward()
            for part in parts:
                part.step()
                part.zero_grad()
        sizes.append((model(tokens[:, :-1], return_logits=True).logits - before).abs().mean().log().item())
    xs = torch.tensor(widths).log() - torch.tensor(widths).log().mean()
    return ((xs * torch.tensor(sizes)).sum() / xs.square().sum()).item()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("optimizer", [adamw, muon])
def test_change_of_the_logits_depends_on_the_width_only_in_the_standard_parametrization(optimizer, tied):
    assert slope(optimizer, Parametrization.standard, tie_embeddings=tied) > 0.5
    assert abs(slope(optimizer, MUP, tie_embeddings=tied)) < 0.25
