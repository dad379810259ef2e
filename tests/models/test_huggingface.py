import json
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig

from foundry.config.schemas.data import StdlibText
from foundry.config.schemas.model import HuggingFace
from foundry.config.schemas.root import Config
from foundry.core.errors import ConfigError
from foundry.models.fsdp_block import find_blocks
from foundry.models.pretrained.huggingface import HuggingFaceCausalLM
from foundry.models.transformer import Transformer
from foundry.parts.model import build_model

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ARCHITECTURES = {
    "llama": LLAMA,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "qwen3": {**LLAMA, "head_dim": 8, "tie_word_embeddings": True},
}


def make(architecture="llama", config=None, *, path=None, vocab_size=61, max_seq_len=16, read_weights=True):
    torch.manual_seed(0)
    config = ARCHITECTURES.get(architecture) if config is None and path is None else config
    return HuggingFaceCausalLM(
        path=path,
        architecture=architecture,
        config=config,
        vocab_size=vocab_size,
        max_seq_len=max_seq_len,
        read_weights=read_weights,
    )


@pytest.mark.parametrize(("architecture", "names"), [("llama", {"LlamaDecoderLayer"}), ("gpt2", {"GPT2Block"})])
def test_blocks_default_to_the_first_module_list_of_a_transformers_model(architecture, names, monkeypatch):
    model = make(architecture)
    declared = list(find_blocks(model))
    monkeypatch.setattr(model.causal_lm, "_no_split_modules", None)
    model.causal_lm.no_blocks = torch.nn.ModuleList()
    model.causal_lm.later = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    assert {kind.__name__ for kind in model.get_fsdp_block_types()} == names
    assert list(find_blocks(model)) == declared
    assert len(declared) == 2


def batch():
    tokens = torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    targets[0, :4] = -100
    return tokens[:, :-1], targets


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_transformers_log_probs_match_cross_entropy_and_reach_all_weights(architecture):
    model, (tokens, targets) = make(architecture), batch()
    output = model(tokens, targets, return_logits=True)
    assert output.logits.shape == (2, 16, 61)
    expected = -F.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="none").view(2, 16)
    torch.testing.assert_close(output.log_prob, expected)
    torch.testing.assert_close(output.logsumexp, output.logits.logsumexp(-1))
    output.log_prob.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert len(list(find_blocks(model))) == 2
    assert model.causal_lm.config.use_cache is False


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_export_loads_into_auto_model(architecture, tmp_path):
    from safetensors.torch import save_file

    model, (tokens, _) = make(architecture), batch()
    save_file(model.export_state(model.state_dict()), tmp_path / "model.safetensors", metadata={"format": "pt"})
    model.hf_config().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True, dtype=torch.float32)
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)

    again = make(path=str(tmp_path))
    torch.testing.assert_close(again(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)


def test_native_transformer_export_loads_into_huggingface_causal_lm(tmp_path):
    from safetensors.torch import save_file

    native = Transformer(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=16
    )
    native.hf_config().save_pretrained(tmp_path)
    save_file(native.export_state(native.state_dict()), tmp_path / "model.safetensors", metadata={"format": "pt"})
    model, (tokens, targets) = make(path=str(tmp_path)), batch()
    torch.testing.assert_close(model(tokens, targets).log_prob, native(tokens, targets).log_prob, rtol=1e-5, atol=1e-5)
    assert model.flops_per_sample(16) == native.flops_per_sample(16)


def test_huggingface_flops_count_a_tied_head_but_no_embedding():
    gpt2 = make("gpt2")
    matmul = 2 * 12 * 32 * 32 + 61 * 32
    assert gpt2.flops_per_sample(16) == 16 * (6 * matmul + 12 * 2 * 32 * 16)
    # Tiny Qwen3 config: 4 heads of 8, 2 key-value heads, tied embeddings.
    matmul = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 61 * 32
    assert make("qwen3").flops_per_sample(16) == 16 * (6 * matmul + 12 * 2 * 32 * 16)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_transformers_residual_stream_is_bf16_under_autocast(architecture):
    model, (tokens, targets) = make(architecture), batch()
    seen = []
    block = next(find_blocks(model))
    block.register_forward_hook(lambda module, args, output: seen.append(output[0].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(tokens, targets).log_prob.dtype == torch.float32
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize(
    ("arguments", "key", "named"),
    [
        ({"architecture": "lama"}, "model.architecture", "llama"),
        ({"config": {"hiden_size": 32}}, "model.config.hiden_size", "hidden_size"),
        ({"config": {**LLAMA, "hidden_size": "x"}}, "model.config", "hidden_size"),
        ({"config": {**LLAMA, "num_attention_heads": 3}}, "model.config", "32"),
        ({"path": "/absent"}, "model.path", "only local files"),
        ({"config": {**LLAMA, "vocab_size": 60}}, "data.vocab_size", "data.vocab_size=60"),
        ({"config": {**LLAMA, "max_position_embeddings": 8}}, "data.seq_len", "data.seq_len=8"),
    ],
)
def test_huggingface_config_errors_name_key_and_value(arguments, key, named):
    with pytest.raises(ConfigError) as caught:
        make(**arguments)
    (violation,) = caught.value.violations
    assert violation.key == key
    assert named in violation.message
    assert "\n" not in str(violation)


@pytest.mark.parametrize(
    ("architecture", "config", "line"),
    [
        ("gpt2", {"n_head": 3}, "n_head: is 3 but must divide the width of 32"),
        ("gpt2", {"n_layer": -1}, "n_layer: is -1 but must be at least 1; the default is 12"),
        ("gpt2", {"n_embd": 0}, "n_embd: is 0 but must be at least 1; the default is 768"),
        ("gpt2", {"n_inner": 0}, "n_inner: is 0 but must be at least 1; the default is null"),
        ("gpt2", {"attn_pdrop": -0.5}, "attn_pdrop: is -0.5 but must be 0 or more; the default is 0.1"),
        ("gpt2", {"initializer_range": -1.0}, "initializer_range: is -1 but must be 0 or more; the default is 0.02"),
        ("gpt2", {"attn_pdrop": 2.0}, "attn_pdrop: is 2 but must be a probability from 0 to 1"),
        ("gpt2", {"activation_function": "foo"}, "config: has fields that transformers rejects: KeyError: 'foo'"),
        ("gpt2", {"attn_implementation": "foo"}, "config: has fields that transformers rejects: Specified `attn"),
        ("llama", {"num_attention_heads": 0}, "config: has fields that transformers rejects: ZeroDivisionError"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads: is 3 but must divide the 4 attention heads"),
        ("llama", {"dtype": "foo"}, "config: has fields that transformers rejects: AttributeError"),
        ("llama", {"pad_token_id": 999}, "config: has fields that transformers rejects: AssertionError"),
        ("llama", {"head_dim": -8}, "head_dim: is -8 but must be at least 1; the default is 128"),
        ("mistral", {"sliding_window": -1}, "sliding_window: is -1 but must be 0 or more; the default is 4096"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts: is 0 but must be at least 1; the default is 8"),
        ("mixtral", {"num_experts_per_tok": 99}, "num_experts_per_tok: is 99 but must be at most the number of"),
        ("mpt", {"d_model": 16, "n_layers": 1, "n_heads": 3}, "n_heads: is 3 but must divide the width of 16"),
        ("qwen3", {"layer_types": ["foo", "bar"]}, "config: has fields that transformers rejects: Class validation"),
    ],
)
def test_invalid_config_fields_are_a_one_line_error(architecture, config, line):
    sizes = {"gpt2": ARCHITECTURES["gpt2"], "mpt": {}}.get(architecture, LLAMA)
    with pytest.raises(ConfigError) as caught:
        make(architecture, {**sizes, **config})
    (text,) = str(caught.value).splitlines()
    assert text.removeprefix("model.").removeprefix("config.").startswith(line)


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("gpt2", {"n_inner": None, "attn_pdrop": 0.0, "bos_token_id": -1}),
        ("llama", {"num_key_value_heads": None, "attention_dropout": 0.0, "head_dim": 6}),
        ("qwen3_moe", {"num_experts": 0}),
    ],
)
def test_intentionally_null_or_zero_config_fields_are_accepted(architecture, config):
    model = make(architecture, {**(ARCHITECTURES["gpt2"] if architecture == "gpt2" else LLAMA), **config})
    assert next(model.parameters()).numel()


WRONG = {
    "heads that do not divide": {"num_attention_heads": 3, "head_dim": None},
    "key heads that do not divide": {"num_attention_heads": 4, "num_key_value_heads": 3},
    "no key heads": {"num_key_value_heads": 0},
    "negative key heads": {"num_key_value_heads": -2},
    "a list of types": {"model_type": ["llama"]},
    "an unknown type": {"model_type": "nope"},
    "a negative width": {"hidden_size": -16},
    "a negative head": {"head_dim": -4},
    "an unknown rope": {"rope_parameters": {"rope_type": "nope"}},
    "a list of ropes": {"rope_parameters": [1]},
    "a vocabulary as text": {"vocab_size": "64"},
    "no vocabulary": {"vocab_size": None},
    "an end of another type": {"eos_token_id": ["a"]},
    "an unknown activation": {"hidden_act": "nope"},
    "padding beyond the vocabulary": {"pad_token_id": 10**6},
    "an unknown dtype": {"dtype": "nope"},
    "a list of dtypes": {"dtype": [1]},
    "an unknown attention": {"_attn_implementation": "nope"},
    "attention as a number": {"attn_implementation": 5},
    "quantization as a list": {"quantization_config": [1]},
    "dropout that is no probability": {"attention_dropout": 5.0},
}


def write_config(folder, **changes):
    content = {**make().config.to_dict(), "architectures": ["LlamaForCausalLM"], **changes}
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


@pytest.mark.parametrize("name", WRONG)
def test_model_folder_with_invalid_settings_is_a_config_error(tmp_path, name):
    with pytest.raises(ConfigError) as refused:
        make(path=write_config(tmp_path, **WRONG[name]), read_weights=False)
    (violation,) = refused.value.violations
    assert violation.key == "model.path"
    assert str(violation).isprintable()


@pytest.mark.parametrize(
    "content",
    ["[]", "5", "null", "{}", "", "[" * 100_000, '{"model_type": "\\ud800"}'],
    ids=["list", "number", "null", "empty object", "nothing", "deep", "half of a pair"],
)
def test_config_json_that_is_not_an_object_is_a_config_error(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"^model\.path: "):
        make(path=str(tmp_path), read_weights=False)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    key=st.sampled_from(sorted({*LlamaConfig().to_dict()} - {"num_hidden_layers"})),
    value=st.sampled_from(["nope", "\ud800", [1], {}, {"a": 1}, None, -1, True, 0.5, [["a"]]]),
)
def test_any_config_json_value_builds_or_is_a_config_error(key, value):
    with TemporaryDirectory() as folder:
        path = write_config(Path(folder), **{key: value})
        with suppress(ConfigError):
            make(path=path, read_weights=False)


def test_model_folder_with_missing_weights_is_refused(tmp_path):
    from safetensors.torch import save_file

    model = make()
    state = model.export_state(model.state_dict())
    del state["model.layers.0.mlp.up_proj.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model.hf_config().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"lacks 1 weight .* model\.layers\.0\.mlp\.up_proj\.weight"):
        make(path=str(tmp_path))


def test_config_fields_override_a_loaded_model(tmp_path):
    make().causal_lm.save_pretrained(tmp_path)
    assert make(path=str(tmp_path), config={"attention_dropout": 0.25}).causal_lm.config.attention_dropout == 0.25


def test_model_loaded_from_a_folder_is_in_training_mode(tmp_path):
    """`from_pretrained` itself returns models in evaluation mode."""
    make().causal_lm.save_pretrained(tmp_path)
    config = Config(
        model=HuggingFace(path=str(tmp_path), vocab_size=61, max_seq_len=16, config={"attention_dropout": 0.25}),
        data=StdlibText(seq_len=16),
    )
    assert all(module.training for module in build_model(config).modules())


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "granitemoe", "minimax"])
def test_moe_with_router_logits_generates_with_cache_and_warns_in_training(architecture):
    experts = {"num_experts" if architecture == "qwen3_moe" else "num_local_experts": 2, "num_experts_per_tok": 1}
    model = make(architecture, {**LLAMA, **experts, "output_router_logits": True}).eval()
    tokens = torch.randint(61, (1, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(tokens).logits[:, -1:]
        if (cache := model.new_cache(8)) is not None:
            model(tokens[:, :5], cache=cache)
            torch.testing.assert_close(model(tokens[:, 5:], cache=cache).logits, whole)
    assert "output_router_logits=true" in model.training_warning()
    assert model.hf_config().output_router_logits is True
    assert make(architecture, {**LLAMA, **experts}).training_warning() is None
