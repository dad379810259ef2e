"""Options of the decoder match a plain loop over rows, heads and positions, and change nothing at initialization."""

import math
from itertools import pairwise

import pytest
import torch

from foundry.core.errors import ConfigError
from foundry.models.token_loss import TokenLoss
from foundry.models.transformer import Transformer
from foundry.optim.optimizers import muon, param_groups

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_seq_len": 16,
}
OPTIONS = {
    "residual scalars": {"residual_scalars": True},
    "value embeddings": {"value_embeddings": [0, -1]},
    "capped logits": {"logit_softcap": 1.5},
}
EVERY = {name: value for options in OPTIONS.values() for name, value in options.items()}
CASES = {**OPTIONS, "every option": {**EVERY, "qk_norm": True, "tie_embeddings": True}}


def make(**changes):
    torch.manual_seed(0)
    return Transformer(**{**SIZES, "init_std": 0.2, **changes})


def changed(model):
    """Change vectors and scalars, whose initial values would hide that one is not used, or is used elsewhere."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.add_(0.5 * torch.rand(parameter.shape, generator=generator) + 0.1)
    return model


def batch(rows=3, seq_len=9):
    tokens = torch.randint(61, (rows, seq_len + 1), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    targets[1, 4:7] = -100
    return tokens[:, :-1], targets


def normed(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotated(head, position):
    """Rotate a head, (head_dim,), as complex numbers of its two halves."""
    first, second = head.chunk(2)
    angles = position / 10000.0 ** (torch.arange(len(first), dtype=head.dtype) / len(first))
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag))


def attended(x, weights, settings, values):
    """Return the attention output for one row, x: (seq, hidden_size); `values`, (seq, width) or (), are added."""
    width = settings.hidden_size // settings.num_heads
    heads = [(x @ weights[f"self_attn.{name}_proj.weight"].T) for name in "qkv"]
    heads[2] = heads[2] + values
    query, key, value = (tensor.unflatten(-1, (-1, width)) for tensor in heads)
    if settings.qk_norm:
        query = normed(query, weights["self_attn.q_norm.weight"])
        key = normed(key, weights["self_attn.k_norm.weight"])
    rows = []
    for place in range(len(x)):
        outputs = []
        for head in range(settings.num_heads):
            group = head * settings.num_kv_heads // settings.num_heads
            asking = rotated(query[place, head], place)
            scores = torch.stack([asking @ rotated(key[other, group], other) for other in range(place + 1)])
            outputs.append((scores / math.sqrt(width)).softmax(0) @ value[: place + 1, group])
        rows.append(torch.cat(outputs))
    return torch.stack(rows) @ weights["self_attn.o_proj.weight"].T


def reference_logits(weights, settings, tokens):
    """Return the logits of a row, (seq, vocab), for tokens: (seq,)."""
    table = weights["model.embed_tokens.weight"]
    x = embedded = table[tokens]
    for layer in range(settings.num_layers):
        prefix = f"model.layers.{layer}."
        own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        if settings.residual_scalars:
            x = own["residual_scale"] * x + own["embedding_scale"] * embedded
        values, named = torch.zeros(()), f"model.value_embeddings.{layer}."
        if f"{named}scale" in weights:
            values = weights[f"{named}scale"] * weights[f"{named}table.weight"][tokens]
        x = x + attended(normed(x, own["input_layernorm.weight"]), own, settings, values)
        hidden = normed(x, own["post_attention_layernorm.weight"])
        gate, up = (hidden @ own[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ own["mlp.down_proj.weight"].T
    head = table if settings.tie_embeddings else weights["lm_head.weight"]
    logits = normed(x, weights["model.norm.weight"]) @ head.T
    cap = settings.logit_softcap
    return logits if cap is None else torch.stack([cap * (logit / cap).tanh() for logit in logits])


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_of_options_match_a_plain_loop(case):
    model, (tokens, targets) = changed(make(**CASES[case])).double(), batch()
    weights = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    expected = torch.stack([reference_logits(weights, model.settings, row) for row in tokens])
    output = model(tokens, targets, return_logits=True)
    torch.testing.assert_close(output.logits, expected, rtol=1e-5, atol=1e-5)  # cosines and sines are fp32
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    (-output.log_prob.sum()).backward()
    gradients = [{name: parameter.grad for name, parameter in model.named_parameters()}]
    model.zero_grad()
    model(tokens, targets, token_loss=TokenLoss()).loss.backward()
    gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for found in gradients:
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, weights[name].grad, rtol=1e-4, atol=1e-5)
            assert gradient.any(), name


@pytest.mark.parametrize("case", ["residual scalars", "value embeddings"])
def test_model_with_learned_scalars_starts_as_the_model_without(case):
    plain, model, (tokens, _) = make(), make(**OPTIONS[case]), batch()
    assert torch.equal(model(tokens).logits, plain(tokens).logits)
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    assert state.keys() > plain.state_dict().keys()


def test_residual_scalars_start_at_one_and_zero():
    scalars = {
        name: value.item() for name, value in make(residual_scalars=True).state_dict().items() if value.ndim == 0
    }
    expected = {"residual_scale": 1.0, "embedding_scale": 0.0}
    assert scalars == {f"model.layers.{index}.{name}": expected[name] for index in range(3) for name in expected}


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_packed_documents_have_the_logits_of_separate_rows(case):
    model = changed(make(**CASES[case]))
    tokens, documents = batch(2, 9)[0], torch.tensor([[0] * 4 + [1] * 5, [2] * 7 + [-1] * 2])
    packed = model(tokens, documents=documents).logits
    for row, start, end in ((0, 0, 4), (0, 4, 9), (1, 0, 7)):
        alone = model(tokens[row : row + 1, start:end]).logits[0]
        torch.testing.assert_close(packed[row, start:end], alone, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_cached_logits_of_options_match(case):
    model, tokens = changed(make(**CASES[case])), batch(3, 12)[0]
    cache = model.new_cache(12)
    for start, end in pairwise((0, 5, 6, 9, 10, 11, 12)):
        logits = model(tokens[:, start:end], cache=cache).logits[:, -1]
        torch.testing.assert_close(logits, model(tokens[:, :end]).logits[:, -1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_meta_model_of_options_is_initialized_like_any(case):
    with torch.device("meta"):
        model = Transformer(**{**SIZES, "init_std": 0.2, **CASES[case]})
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    model.init_weights()
    torch.manual_seed(5)
    other = make(**CASES[case])
    torch.manual_seed(5)
    other.init_weights()
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_value_embeddings_have_a_table_per_layer_and_a_factor_of_zero():
    model = make(value_embeddings=[0, -1], embedding_init_std=0.5)
    state = {name: value for name, value in model.state_dict().items() if "value_embeddings" in name}
    names = [f"model.value_embeddings.{layer}.{name}" for layer in (0, 2) for name in ("scale", "table.weight")]
    assert sorted(state) == names
    for layer in (0, 2):
        assert state[f"model.value_embeddings.{layer}.scale"] == 0
        table = state[f"model.value_embeddings.{layer}.table.weight"]
        assert table.shape == (61, 2 * 8)
        assert table.std().item() == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([3], "has 3 but the model has 3 layers; choose numbers from -3 to 2"),
        ([0, -4], "has -4 but the model has 3 layers; choose numbers from -3 to 2"),
        ([0, 2, -1], "is [0, 2, -1], which names a layer twice; set it to [0,2]"),
    ],
)
def test_value_embeddings_of_no_layer_or_twice_of_a_layer_are_refused(layers, message):
    with pytest.raises(ConfigError) as error:
        make(value_embeddings=layers)
    assert str(error.value) == f"model.value_embeddings: {message}"


@torch.no_grad()
def test_capped_logits_are_those_of_generation_evaluation_and_every_read():
    model, plain, (tokens, targets) = make(logit_softcap=1.5), make(), batch()
    expected = 1.5 * (plain(tokens).logits / 1.5).tanh()
    assert plain(tokens).logits.abs().max() > 3
    read = []
    options = {"read": lambda logits, _: read.append(logits) or {}}
    for tile in (0, 4):
        read.clear()
        output = make(logit_softcap=1.5, logprob_tile_tokens=tile)(tokens, targets, **options)
        torch.testing.assert_close(torch.cat(read).view(expected.shape), expected)
        log_probs = expected.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        torch.testing.assert_close(output.log_prob, log_probs.masked_fill(targets < 0, 0.0))
        torch.testing.assert_close(output.logsumexp, expected.logsumexp(-1))
    torch.testing.assert_close(model(tokens).logits, expected)
    torch.testing.assert_close(model(tokens, targets, return_logits=True).logits, expected)
    torch.testing.assert_close(model(tokens, cache=model.new_cache(9)).logits, expected[:, -1:])


@pytest.mark.parametrize("case", OPTIONS)
def test_options_add_no_flops(case):
    assert make(**OPTIONS[case]).flops_per_sample(16) == make().flops_per_sample(16)


def test_residual_scalars_are_vectors_of_the_optimizers():
    model = make(residual_scalars=True)
    scalars = {parameter for parameter in model.parameters() if parameter.ndim == 0}
    assert len(scalars) == 6
    (group,) = (group for group in param_groups(model, 0.1) if scalars & {*group["params"]})
    assert scalars < {*group["params"]}
    assert group["weight_decay"] == 0
    matrices, others = muon(model=model, lr=0.1)
    assert not scalars & {p for group in matrices.param_groups for p in group["params"]}
    assert scalars < {p for group in others.param_groups for p in group["params"]}


def test_value_embeddings_are_embeddings_of_the_optimizers():
    model = make(value_embeddings=[0, -1])
    names = {f"model.value_embeddings.{layer}.table.weight" for layer in (0, 2)} | {"model.embed_tokens.weight"}
    expected = {parameter for name, parameter in model.named_parameters() if name in names}
    groups = {"embeddings": {"lr_mult": 0.1, "wd_mult": None}}
    (group,) = (group for group in param_groups(model, 0.1, groups) if group["lr_mult"] == 0.1)
    assert {*group["params"]} == expected
    scales = {parameter for name, parameter in model.named_parameters() if name.endswith(".scale")}
    matrices, others = muon(model=model, lr=0.1)
    assert not (expected | scales) & {p for group in matrices.param_groups for p in group["params"]}
    decay = {p: group["weight_decay"] for group in others.param_groups for p in group["params"]}
    assert [decay[scale] for scale in scales] == [0, 0]


@pytest.mark.parametrize("case", OPTIONS)
def test_config_for_transformers_is_refused_with_options(case):
    ((name, value),) = OPTIONS[case].items()
    with pytest.raises(ConfigError) as error:
        make(**OPTIONS[case]).hf_config()
    ((key, message),) = [(violation.key, violation.message) for violation in error.value.violations]
    assert key == f"model.{name}"
    text = f"{value:g}" if isinstance(value, float) else str(value).lower()
    assert message.startswith(f"is {text} but no model class of transformers has this option")
