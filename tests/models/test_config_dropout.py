"""`objective.hidden_dropout` and `.attention_dropout` reach every dropout of a transformers model, and nothing else."""

import re

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from foundry.core.errors import ConfigError
from foundry.models.pretrained.config_dropout import put, set_dropouts
from foundry.models.pretrained.huggingface import HuggingFaceCausalLM

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
GPT = {"n_embd": 16, "n_layer": 1, "n_head": 2}
BUILT = {
    "gpt2": GPT,
    "gptj": {**GPT, "rotary_dim": 4},
    "gpt_neo": {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]]},
    "gpt_neox": SMALL,
    "bloom": {"hidden_size": 16, "n_layer": 1, "n_head": 2},
    "falcon": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    "opt": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "ffn_dim": 24,
        "word_embed_proj_dim": 16,
    },
    "biogpt": SMALL,
    "mpt": {"d_model": 16, "n_layers": 1, "n_heads": 2},
    "starcoder2": {**SMALL, "num_key_value_heads": 1},
}
OF_OTHER_HEADS = ("classifier", "summary")


def dropouts(node, prefix=""):
    """Yield name and value of every dropout number in a config dictionary, without numbers of unused heads."""
    for name, value in node.items():
        if isinstance(value, dict):
            yield from dropouts(value, f"{prefix}{name}.")
        elif "drop" in str(name) and isinstance(value, (int, float)) and not name.startswith(OF_OTHER_HEADS):
            yield f"{prefix}{name}", value


def everything_drops(architecture):
    config = CONFIG_MAPPING[architecture](**BUILT.get(architecture, {}))
    for name, _ in list(dropouts(config.to_dict())):
        put(config, name, 0.25)
    return config


def check_zero(config):
    before = config.to_dict()
    had = set_dropouts(config, hidden_dropout=0.0, attention_dropout=0.0)
    assert [name for name, value in dropouts(config.to_dict()) if value] == []
    for name, value in had.items():
        put(config, name, value)
    assert config.to_dict() == before


@pytest.mark.parametrize("architecture", BUILT)
def test_zero_leaves_no_dropout_in_a_config(architecture):
    check_zero(everything_drops(architecture))


@pytest.mark.long
@pytest.mark.parametrize(
    "architecture", [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING and name not in BUILT]
)
def test_zero_leaves_no_dropout_in_any_config_of_a_language_model(architecture):
    try:
        config = everything_drops(architecture)
    except Exception as error:  # The defaults of a few architectures contradict each other.
        pytest.skip(f"no default config: {error}")
    check_zero(config)


@pytest.mark.parametrize("architecture", BUILT)
def test_zero_dropout_makes_training_passes_equal(architecture):
    passes = {}
    for probability in (0.0, 0.5):
        fields = dict(BUILT[architecture]) | {
            name: 0.5 for name, _ in dropouts(CONFIG_MAPPING[architecture]().to_dict()) if "." not in name
        }
        torch.manual_seed(0)
        model = HuggingFaceCausalLM(
            path=None,
            architecture=architecture,
            config=fields,
            vocab_size=32,
            max_seq_len=8,
            hidden_dropout=probability,
            attention_dropout=probability,
        ).train()
        tokens = torch.arange(8)[None]
        passes[probability] = [model(tokens, tokens).log_prob for _ in range(2)]
    assert passes[0.0][0].equal(passes[0.0][1])
    assert not passes[0.5][0].equal(passes[0.5][1])


def test_hidden_dropout_sets_residuals_and_embeddings_only():
    config = CONFIG_MAPPING["opt"](dropout=0.1, activation_dropout=0.0, layerdrop=0.0)
    assert set_dropouts(config, hidden_dropout=0.3, attention_dropout=None) == {"dropout": 0.1}
    config = CONFIG_MAPPING["gpt2"]()
    set_dropouts(config, hidden_dropout=0.3, attention_dropout=0.2)
    found = (config.resid_pdrop, config.embd_pdrop, config.attn_pdrop, config.summary_first_dropout)
    assert found == (0.3, 0.3, 0.2, 0.1)


def test_architecture_without_dropout_accepts_only_zero():
    config = CONFIG_MAPPING["mamba"]()
    assert set_dropouts(config, hidden_dropout=0.0, attention_dropout=0.0) == {}
    with pytest.raises(ConfigError, match=re.escape("objective.hidden_dropout: is 0.3 but transformers' mamba has no")):
        set_dropouts(config, hidden_dropout=0.3)
