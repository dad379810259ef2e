import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from foundry.checkpoint.export_files import WEIGHTS, WEIGHTS_INDEX, Weight, write_weights
from foundry.checkpoint.shard import DTYPES


def held(state):
    return {name: Weight.from_tensor(tensor, tensor.dtype) for name, tensor in state.items()}


def test_small_export_equals_the_file_of_safetensors(tmp_path):
    torch.manual_seed(0)
    state = {f"é{number}": (torch.randn(3, number) * 4).to(dtype) for number, dtype in enumerate(DTYPES)}
    state |= {"scalar": torch.tensor(3.5), "transposed": torch.randn(4, 6).T}
    write_weights(tmp_path, held(state))
    save_file({n: t.contiguous() for n, t in state.items()}, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / WEIGHTS).read_bytes() == (tmp_path / "theirs").read_bytes()
    assert not (tmp_path / WEIGHTS_INDEX).exists()


def test_large_export_is_split_into_files_with_an_index(tmp_path):
    state = {name: torch.full((size,), float(size)) for name, size in (("c", 10), ("a", 15), ("d", 40), ("b", 5))}
    write_weights(tmp_path, held(state), max_file_bytes=100)
    index = json.loads((tmp_path / WEIGHTS_INDEX).read_text())
    files = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert index["weight_map"] == {"c": files[0], "a": files[0], "d": files[1], "b": files[2]}
    assert index["metadata"] == {"total_parameters": 70, "total_size": 280}
    read = {name: tensor for file in files for name, tensor in load_file(tmp_path / file).items()}
    assert all(read[name].equal(tensor) for name, tensor in state.items())
    assert not (tmp_path / WEIGHTS).exists()


@pytest.mark.long
def test_transformers_reads_a_split_export(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes))
    write_weights(tmp_path, held(model.state_dict()), max_file_bytes=4000)
    model.config.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert len(list(tmp_path.glob("model-*"))) > 2
    assert all(again.state_dict()[name].equal(tensor) for name, tensor in model.state_dict().items())
