import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from torch import nn

from foundry.core.errors import ConfigError
from foundry.models.pretrained import base_sizes
from foundry.models.pretrained.base_sizes import bounded_modules, check_own_sizes, check_sizes


@settings(max_examples=examples(25))
@given(
    st.sampled_from(
        ["num_hidden_layers", "n_layer", "encoder_layers", "hidden_size", "vocab_size", "n_embd", "d_model"]
    )
    | st.sampled_from(["max_position_embeddings", "num_experts", "num_attention_heads", "head_dim", "new_n_layers"]),
    st.integers(10**9) | st.floats(1e10),
    st.sampled_from(
        [lambda config: config, lambda config: {"text_config": config}, lambda config: {"a": {"b": config}}]
    ),
)
def test_oversized_config_values_are_refused_before_building(tmp_path_factory, name, value, nested):
    folder = tmp_path_factory.mktemp("base")
    (folder / "config.json").write_text(json.dumps(nested({name: value})))
    with pytest.raises(ConfigError, match=rf"{name}=.* is above"):
        check_sizes(folder)
    with pytest.raises(ConfigError, match=rf"model\.config\..*{name}: is"):
        check_own_sizes(nested({name: value}))


def test_sizes_of_known_models_are_accepted(tmp_path):
    known = {"vocab_size": 290_943, "ngram_vocab_size_base": 20_000_000, "max_position_embeddings": 10_485_760}
    large = {"num_experts": 16_384, "num_hidden_layers": 128, "max_window_layers": 80, "seed": 2**40, "flag": True}
    (tmp_path / "config.json").write_text(json.dumps({**known, **large}))
    check_sizes(tmp_path)
    check_own_sizes(known)


def test_building_stops_at_the_largest_number_of_modules(monkeypatch):
    monkeypatch.setattr(base_sizes, "_MAX_MODULES", 100)
    with bounded_modules():
        nn.Sequential(*(nn.Identity() for _ in range(100)))
    with pytest.raises(ConfigError, match="more than 100 modules"), bounded_modules():
        nn.Sequential(*(nn.Sequential(nn.Identity()) for _ in range(60)))
    nn.Sequential(*(nn.Identity() for _ in range(200)))
