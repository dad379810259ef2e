"""Initial weights: exact formulas, and the distribution of each kind of matrix of each architecture."""

import math
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from foundry.checkpoint.init_from import compare_files, copy_files, weight_files
from foundry.core.errors import ConfigError
from foundry.models.initialisation import InitialModel, allocate, matrices_on_meta, output_std, resolve_std
from foundry.models.keyed_draws import Normal, Part, draw_parts
from foundry.models.pretrained.huggingface import HuggingFaceCausalLM
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
# Config of each architecture, and the name suffixes of the projections into the residual stream.
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
    """Check the standard deviation within three standard errors; mean and fourth moment (3 std^4) within five."""
    values = torch.cat([value.detach().double().flatten() for value in values])
    assert len(values) > 1000
    assert abs(values.mean().item()) < 5 * std / math.sqrt(len(values))
    assert abs(values.std().item() - std) < 3 * std / math.sqrt(2 * len(values))
    kurtosis = ((values / std) ** 4).mean().item()
    assert abs(kurtosis - 3) < 5 * math.sqrt(96 / len(values))


def assert_initialised(model, outputs):
    """Check the standard deviation of every kind of matrix; `outputs` are the suffixes of output projections."""
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
            kinds.setdefault((leaf, EMBEDDING), []).append(parameter[2:])  # Row 1 is the padding row of OPT.
        else:
            kinds.setdefault((leaf, STD), []).append(parameter)
    assert [len(kinds[ending, STD / math.sqrt(2.0 * LAYERS)]) for ending in outputs] == [LAYERS, LAYERS]
    for (_, std), values in kinds.items():
        assert_drawn(values, std)


def test_init_std_formulas_are_exact():
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
def test_native_model_is_initialized_by_kind_of_matrix(tied):
    model = native(init_std="small", embedding_init_std=EMBEDDING, tie_embeddings=tied)
    assert_initialised(model, ("o_proj", "down_proj"))
    assert model.hf_config().initializer_range == STD


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_transformers_models_are_initialized_by_kind_of_matrix(architecture):
    model = hf(architecture)
    assert_initialised(model, ARCHITECTURES[architecture][1])
    field = "init_std" if architecture == "opt" else "initializer_range"
    assert getattr(model.hf_config(), field) == getattr(model.causal_lm.config, field) == STD


def test_embedding_uses_init_std_and_a_tied_head_shares_the_embedding():
    model = native(init_std=0.1)
    assert_drawn([model.model.embed_tokens.weight], 0.1)
    tied = hf("qwen2", embedding_init_std=None)
    assert tied.causal_lm.lm_head.weight is tied.causal_lm.model.embed_tokens.weight
    assert_drawn([tied.causal_lm.lm_head.weight], STD)


def test_padding_row_stays_zero_at_initialization():
    embedding = hf("opt").causal_lm.model.decoder.embed_tokens
    assert embedding.padding_idx == 1
    assert not embedding.weight[1].any()
    assert embedding.weight[[0, 2]].all()


@pytest.mark.parametrize("tied", [False, True])
def test_native_init_is_keyed_by_parameter_name_and_scales_with_std(tied):
    model = native(tie_embeddings=tied)
    model.init_weights(seed=5)
    wide = math.sqrt(2 * LAYERS)
    matrices = {name: p for name, p in model.named_parameters() if p.ndim == 2}
    assert len(matrices) == 7 * LAYERS + (1 if tied else 2)
    for name, matrix in matrices.items():
        std = 0.02 / wide if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
        alone = torch.empty_like(matrix)
        draw_parts({name: Normal(std)}, {name: Part.from_tensor(alone)}, seed=5)
        assert torch.equal(matrix, alone), name


def test_torch_seed_determines_the_initial_model():
    first, second = native().state_dict(), native().state_dict()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "max_seq_len": 8}
    heads = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
    one, other = (Transformer(**sizes, **heads).lm_head.weight for _ in range(2))
    assert not torch.equal(one, other)


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_on_meta_keeps_ties_and_allocates_vectors(tied):
    with matrices_on_meta():
        model = native(tie_embeddings=tied)
        pair = torch.nn.ModuleList([torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)])
        pair[1].weight = pair[0].weight
    assert all(p.is_meta == (p.ndim >= 2) for p in (*model.parameters(), *pair.parameters()))
    assert pair[1].weight is pair[0].weight
    allocate(pair.parameters(), "cpu")
    assert pair[1].weight is pair[0].weight
    assert not pair[0].weight.is_meta
    assert not torch.nn.Linear(4, 3).weight.is_meta
    allocate(model.parameters(), "cpu")
    model.init_weights(seed=3)
    expected = native(tie_embeddings=tied)
    expected.init_weights(seed=3)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.state_dict().items())


@pytest.mark.parametrize("architecture", ["gpt2", "mixtral"])
def test_same_seed_gives_the_same_transformers_weights(architecture):
    first, second = hf(architecture).state_dict(), hf(architecture).state_dict()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_null_init_std_keeps_the_initialization_of_the_architecture():
    from transformers import AutoModelForCausalLM

    model = hf("llama", init_std=None, embedding_init_std=None)
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(model.config).state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in model.causal_lm.state_dict().items())


@pytest.mark.parametrize("context", [lambda: torch.device("meta"), FakeTensorMode], ids=["meta", "fake"])
def test_models_can_be_built_on_meta_and_fake_tensors(context):
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
def test_init_std_of_an_unsupported_architecture_is_refused(architecture, config, named):
    with pytest.raises(ConfigError) as caught:
        hf(architecture, config=config)
    (violation,) = caught.value.violations
    assert violation.key == "model.init_std"
    assert all(name in violation.message for name in [*named, "null for the architecture's own"])
    assert "\n" not in violation.message


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_meta_transformers_model_is_initialized_or_loaded_like_a_real_one(architecture, tied, tmp_path):
    config = {**ARCHITECTURES[architecture][0], "tie_word_embeddings": tied}
    expected = hf(architecture, config=config)
    expected.init_weights(seed=9)
    with matrices_on_meta():
        model = hf(architecture, config=config)
    assert all(parameter.is_meta == (parameter.ndim >= 2) for parameter in model.parameters())
    initial = InitialModel(model, lambda model: model.init_weights(seed=9))
    assert_same_state(initial.materialize(), expected)
    expected.causal_lm.save_pretrained(tmp_path)
    files = weight_files(tmp_path)
    with matrices_on_meta():
        model = hf(architecture, config=config)
    converted = architecture == "mixtral" or (architecture == "gpt_neox" and not tied)  # Other tensors in files.
    assert bool(compare_files(files, model)) == converted
    if not converted:
        assert_same_state(InitialModel(model, partial(copy_files, files)).materialize(), expected)


def assert_same_state(model, expected):
    found = model.state_dict()
    assert found.keys() == expected.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in expected.state_dict().items())
    shared = [len({id(p) for p in each.parameters()}) for each in (model, expected)]
    assert shared[0] == shared[1]
    buffers = [dict(each.named_buffers()) for each in (model, expected)]
    assert all(torch.equal(buffer, buffers[1][name]) for name, buffer in buffers[0].items())
