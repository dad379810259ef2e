import json
import os
import pickle
import re

import pytest
import torch
from safetensors.torch import save_file

from foundry.core.errors import ConfigError
from foundry.models.pretrained.base_files import check_weights

CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 16,
}


class Settings:
    transformers_weights = None


def folder_of(path, names, **index):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    weight_map = {f"w{number}": name for number, name in enumerate(names)}
    content = {"metadata": {}, "weight_map": weight_map, **index}
    (path / "model.safetensors.index.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    "name",
    [
        *("w.bin", "../outside.safetensors", "{tmp}/outside.safetensors", "sub/x.safetensors", "pipe.safetensors"),
        *("", "x.safetensors\0", "missing.safetensors", ".safetensors/..", 3, None, ["x.safetensors"]),
    ],
)
def test_index_may_name_only_regular_safetensors_files_of_its_folder(tmp_path, name):
    save_file({"w0": torch.zeros(1)}, tmp_path / "outside.safetensors")
    name = name.format(tmp=tmp_path) if isinstance(name, str) else name
    folder = folder_of(tmp_path / "base", ["x.safetensors", name])
    save_file({"w0": torch.zeros(1)}, folder / "x.safetensors")
    (folder / "sub").mkdir()
    save_file({"w0": torch.zeros(1)}, folder / "sub" / "x.safetensors")
    (folder / "w.bin").write_bytes(pickle.dumps({}))
    os.mkfifo(folder / "pipe.safetensors")
    with pytest.raises(ConfigError, match="names the weight file"):
        check_weights(folder, Settings())
    folder_of(folder, ["x.safetensors"])
    check_weights(folder, Settings())


@pytest.mark.parametrize("name", ["adapter_model.bin", "../outside.safetensors", "../outside.safetensors.index.json"])
def test_config_may_name_only_weights_of_its_folder(tmp_path, name):
    settings = Settings()
    settings.transformers_weights = name
    with pytest.raises(ConfigError, match="names the weight file"):
        check_weights(folder_of(tmp_path / "base", []), settings)


@pytest.mark.parametrize("content", ["", "[]", '{"weight_map": []}', '{"weight_map": {}}', "{" * 5000])
def test_damaged_weight_index_is_a_config_error(tmp_path, content):
    folder = folder_of(tmp_path / "base", [])
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ConfigError, match="index"):
        check_weights(folder, Settings())


def test_symlinked_weights_are_accepted(tmp_path):
    folder = folder_of(tmp_path / "base", ["x.safetensors"])
    save_file({"w0": torch.zeros(1)}, tmp_path / "blob")
    (folder / "x.safetensors").symlink_to(tmp_path / "blob")
    check_weights(folder, Settings())


def test_adapter_config_beside_weights_is_refused(tmp_path):
    folder = folder_of(tmp_path / "base", [])
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')
    with pytest.raises(ConfigError, match=re.escape("adapter_config.json")):
        check_weights(folder, Settings())


def test_pickle_named_in_a_weight_index_is_not_loaded(tmp_path, monkeypatch):
    from foundry.models.pretrained.huggingface import HuggingFaceCausalLM

    loaded = []
    monkeypatch.setattr(torch, "load", lambda *args, **options: loaded.append(args))
    folder = folder_of(tmp_path / "base", ["w.bin"])
    torch.save({}, folder / "w.bin")
    with pytest.raises(ConfigError, match=r"w\.bin, which does not end in \.safetensors"):
        HuggingFaceCausalLM(path=str(folder), architecture="llama", config=None, vocab_size=61, max_seq_len=16)
    assert not loaded
