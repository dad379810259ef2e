"""Initial weights: exact formulas, and what is drawn for each kind of matrix of each architecture."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from foundry.config.errors import ConfigError
from foundry.models.huggingface import HuggingFaceCausalLM
from foundry.models.initialisation import output_std, resolve_std
from foundry.models.transformer import Transformer

LAYERS, HIDDEN, VOCAB = 3, 64, 211
STD, EMBEDDING = math.sqrt(2 / (5 * HIDDEN)), 0.3
LLAMA = {
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
NEOX = {"hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
OPT = {
    "hidden_size": HIDDEN,
    "ffn_dim": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "word_embed_proj_dim": 32,
    "pad_token_id": 1,
}
ROUTED = {**LLAMA, "num_local_experts": 8, "num_experts_per_tok": 2}
# By architecture: its config, and the endings of the names of what a block adds to the residual stream.
ARCHITECTURES = {
    "llama": (LLAMA, ("self_attn.o_proj", "mlp.down_proj")),
    "qwen2": ({**LLAMA, "tie_word_embeddings": True}, ("self_attn.o_proj", "mlp.down_proj")),
    "gpt2": ({"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4}, ("attn.c_proj", "mlp.c_proj")),
    "gpt_neox": (NEOX, ("attention.dense", "mlp.dense_4h_to_h")),
    "opt": (OPT, ("self_attn.out_proj", "fc2")),
    "mixtral": (ROUTED, ("self_attn.o_proj", "mlp.experts.down_proj")),
}


def native(**changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 96, "max_seq_len": 32}
    heads = {"num_layers": LAYERS, "num_heads": 4, "num_kv_heads": 2}
    return Transformer(**{**sizes, **heads, **changes})


def hf(architecture, **changes):
    torch.manual_seed(0)
    arguments = {"init_std": "small", "embedding_init_std": EMBEDDING, **changes}
    config, _ = ARCHITECTURES.get(architecture, (changes.pop("config", None), None))
    arguments = {"path": None, "config": config, "vocab_size": VOCAB, "max_seq_len": 32, **arguments}
    return HuggingFaceCausalLM(architecture=architecture, **arguments)


def assert_drawn(values, std):
    """The standard deviation within three standard errors; mean and fourth moment, 3 std^4, within five."""
    values = torch.cat([value.detach().double().flatten() for value in values])
    assert len(values) > 1000
    assert abs(values.mean().item()) < 5 * std / math.sqrt(len(values))
    assert abs(values.std().item() - std) < 3 * std / math.sqrt(2 * len(values))
    kurtosis = ((values / std) ** 4).mean().item()
    assert abs(kurtosis - 3) < 5 * math.sqrt(96 / len(values))


def assert_initialised(model, outputs):
    """Every matrix's kind, with its own standard deviation; `outputs` are the endings of output projections."""
    kinds = {}
    for name, parameter in model.named_parameters():
        path = name.removesuffix(".weight")
        leaf = path.rpartition(".")[2]
        if name.endswith("bias"):
            assert not parameter.any()
        elif "norm" in leaf or leaf.startswith("ln_"):
            assert (parameter == 1).all()
        elif path.endswith(outputs):
            ending = next(ending for ending in outputs if path.endswith(ending))
            kinds.setdefault((ending, STD / math.sqrt(2.0 * LAYERS)), []).append(parameter)
        elif "embed" in leaf or leaf in ("wte", "wpe"):
            kinds.setdefault((leaf, EMBEDDING), []).append(parameter[2:])  # OPT's padding row is the second
        else:
            kinds.setdefault((leaf, STD), []).append(parameter)
    assert [len(kinds[ending, STD / math.sqrt(2.0 * LAYERS)]) for ending in outputs] == [LAYERS, LAYERS]
    for (_, std), values in kinds.items():
        assert_drawn(values, std)


def test_formulas_are_exact():
    for hidden_size in (64, 4096, 12288, 14336):
        assert resolve_std("small", hidden_size) == math.sqrt(2 / (5 * hidden_size))
        assert resolve_std("wang", hidden_size) == math.sqrt(1 / (3 * hidden_size))
    assert (round(resolve_std("small", 14336), 6), round(resolve_std("wang", 14336), 6)) == (0.005282, 0.004822)
    assert resolve_std(0.006, 64) == 0.006
    for layers in (1, 2, 3, 24, 70, 105):
        assert output_std(0.006, layers) == 0.006 / math.sqrt(2.0 * layers)
    with pytest.raises(ValueError, match="did you mean wang"):
        resolve_std("wnag", 64)


@pytest.mark.parametrize("tied", [False, True])
def test_the_native_model(tied):
    model = native(init_std="small", embedding_init_std=EMBEDDING, tie_embeddings=tied)
    assert_initialised(model, ("o_proj", "down_proj"))
    assert model.hf_config().initializer_range == STD


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_models_of_transformers(architecture):
    model = hf(architecture)
    assert_initialised(model, ARCHITECTURES[architecture][1])
    field = "init_std" if architecture == "opt" else "initializer_range"
    assert getattr(model.hf_config(), field) == getattr(model.causal_lm.config, field) == STD


def test_the_embedding_follows_init_std_and_a_tied_head_the_embedding():
    model = native(init_std=0.1)
    assert_drawn([model.model.embed_tokens.weight], 0.1)
    tied = hf("qwen2", embedding_init_std=None)
    assert tied.causal_lm.lm_head.weight is tied.causal_lm.model.embed_tokens.weight
    assert_drawn([tied.causal_lm.lm_head.weight], STD)


def test_a_padding_row_stays_zero():
    embedding = hf("opt").causal_lm.model.decoder.embed_tokens
    assert embedding.padding_idx == 1
    assert not embedding.weight[1].any()
    assert embedding.weight[[0, 2]].all()


@pytest.mark.parametrize("tied", [False, True])
def test_draws_come_in_the_order_of_the_parameters_and_scale_with_the_std(tied):
    model = native(tie_embeddings=tied)
    torch.manual_seed(5)
    model.init_weights()
    torch.manual_seed(5)
    wide = math.sqrt(2 * LAYERS)
    expected = {"model.embed_tokens": torch.empty(VOCAB, HIDDEN).normal_(0.0, 0.02)}
    shapes = {"q": (64, 64), "k": (32, 64), "v": (32, 64), "o": (64, 64), "gate": (96, 64), "up": (96, 64)}
    for layer in range(LAYERS):
        for name, shape in {**shapes, "down": (64, 96)}.items():
            part = "self_attn" if name in "qkvo" else "mlp"
            std = 0.02 / wide if name in ("o", "down") else 0.02
            expected[f"model.layers.{layer}.{part}.{name}_proj"] = torch.empty(shape).normal_(0.0, std)
    if not tied:
        expected["lm_head"] = torch.empty(VOCAB, HIDDEN).normal_(0.0, 0.02)
    drawn = {name.removesuffix(".weight"): p for name, p in model.named_parameters() if p.ndim == 2}
    assert list(drawn) == list(expected)
    assert all(torch.equal(drawn[name], value) for name, value in expected.items())


@pytest.mark.parametrize("architecture", ["gpt2", "mixtral"])
def test_the_same_seed_gives_the_same_weights(architecture):
    first, second = hf(architecture).state_dict(), hf(architecture).state_dict()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_without_init_std_the_architectures_own_stays():
    from transformers import AutoModelForCausalLM

    model = hf("llama", init_std=None, embedding_init_std=None)
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(model.config).state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in model.causal_lm.state_dict().items())


@pytest.mark.parametrize("context", [lambda: torch.device("meta"), FakeTensorMode], ids=["meta", "fake"])
def test_models_without_storage_can_be_built(context):
    with context():
        models = [native(init_std="wang"), *(hf(architecture) for architecture in ARCHITECTURES)]
    for model in models:
        assert sum(p.numel() for p in model.parameters()) > 1e5
        assert all(p.is_meta or p.fake_mode is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("architecture", "config", "named"),
    [
        ("rwkv", {"hidden_size": 32, "num_hidden_layers": 2}, ["RwkvBlock", "attention.output.weight"]),
        ("ctrl", {"n_embd": 32, "n_layer": 2, "n_head": 2, "dff": 64}, ["EncoderLayer", "ffn.2.weight"]),
        ("lfm2", {**LLAMA, "layer_types": ["conv", "full_attention", "conv"]}, ["conv.conv.weight"]),
    ],
)
def test_an_architecture_it_does_not_know_is_refused(architecture, config, named):
    with pytest.raises(ConfigError) as caught:
        hf(architecture, config=config)
    (violation,) = caught.value.violations
    assert violation.key == "model.init_std"
    assert all(name in violation.message for name in [*named, "null for the architecture's own"])
    assert "\n" not in violation.message
