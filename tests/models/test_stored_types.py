"""A pretrained folder is loaded exactly or refused: unsupported dtypes, and scales that the model does not read."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from foundry.checkpoint.init_from import init_from
from foundry.core.errors import ConfigError
from foundry.models.pretrained.huggingface import HuggingFaceCausalLM
from foundry.models.pretrained.stored_types import find_wrong_types
from foundry.parallel.process_group import World

ALONE = World.single(torch.device("cpu"))
LLAMA = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16}
WEIGHT = "model.layers.0.mlp.up_proj.weight"
TYPES = {
    torch.float32: True,
    torch.bfloat16: True,
    torch.float16: True,
    torch.float64: False,
    torch.float8_e4m3fn: False,
    torch.float8_e5m2: False,
    torch.int64: False,
    torch.int8: False,
    torch.uint8: False,
    torch.bool: False,
    torch.complex64: False,
}


def read(folder):
    return HuggingFaceCausalLM(path=str(folder), architecture="llama", config=None, vocab_size=16, max_seq_len=8)


@pytest.fixture(scope="module")
def made():
    return HuggingFaceCausalLM(path=None, architecture="llama", config=LLAMA, vocab_size=16, max_seq_len=8)


@pytest.fixture
def folder(made, tmp_path):
    made.causal_lm.save_pretrained(tmp_path)
    return tmp_path


def change(folder, tensors):
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})


@pytest.mark.filterwarnings("ignore:Casting complex values")  # Issued by torch when transformers reads complex tensors.
@pytest.mark.parametrize(("dtype", "is_read"), TYPES.items(), ids=map(str, TYPES))
def test_model_folder_may_hold_16_and_32_bit_floats_only(folder, dtype, is_read):
    values = (torch.arange(256).view(16, 16) % 2).to(dtype)
    change(folder, {WEIGHT: values})
    if is_read:
        assert read(folder).causal_lm.get_parameter(WEIGHT).equal(values.float())
        return
    with pytest.raises(
        ConfigError, match=rf"^model\.path: '{folder}' holds {WEIGHT} \([A-Z0-9_]+\), but only F32, BF16"
    ):
        read(folder)


@pytest.mark.parametrize(("dtype", "is_read"), TYPES.items(), ids=map(str, TYPES))
def test_weights_file_may_hold_16_and_32_bit_floats_only(tmp_path, dtype, is_read):
    model, values = nn.Linear(2, 2, bias=False), torch.ones(2, 2).to(dtype)
    save_file({"weight": values}, tmp_path / "a.safetensors")
    if is_read:
        init_from(tmp_path, ALONE, model)
        assert model.weight.equal(values.float())
        return
    with pytest.raises(ConfigError, match=r"does not fit the model: it has weight as [A-Z0-9_]+ instead of F32, BF16"):
        init_from(tmp_path, ALONE, model)


@pytest.mark.parametrize(
    "name",
    [
        f"{WEIGHT}_scale_inv",
        f"{WEIGHT}_scale",
        "model.layers.0.mlp.up_proj.scales",
        "model.layers.0.mlp.up_proj.input_scale",
        "model.layers.0.mlp.up_proj.weight_zero_point",
        f"{WEIGHT}.absmax",
        "model.layers.0.self_attn.k_scale",
    ],
)
def test_quantization_scales_without_a_reader_are_refused(folder, name):
    change(folder, {name: torch.ones(1)})
    with pytest.raises(ConfigError, match=rf"holds {name}, which the model does not read: its weights are"):
        read(folder)


def test_buffers_of_a_model_folder_may_have_any_dtype(folder):
    rotary = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4, dtype=torch.float64)}
    change(folder, {**rotary, "model.layers.0.mask": torch.ones(2, dtype=torch.bool)})
    read(folder)
    types = {"positions": "I64", "h.0.attn.mask": "BOOL", "weight": "BF16"}
    assert find_wrong_types(types, (), (r"attn\.mask$",), {"positions"}) == ""


def test_sharded_weights_are_checked_through_the_index(folder):
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {
        "model-00001-of-00002.safetensors": [WEIGHT],
        "model-00002-of-00002.safetensors": [*whole.keys() - {WEIGHT}],
    }
    for file, names in files.items():
        save_file({name: whole[name] for name in names}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, names in files.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"layers.0.wq": torch.ones(1, dtype=torch.int8)}, folder / "consolidated.safetensors")
    read(folder)
    save_file({WEIGHT: whole[WEIGHT].to(torch.int8)}, folder / next(iter(files)), metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"holds {WEIGHT} \(I8\)"):
        read(folder)


@pytest.mark.parametrize(
    ("asked", "method"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "compressed-tensors"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "of another program"}, "of another program"),
        ({"load_in_8bit": True}, "quantization_config"),
    ],
)
def test_quantized_base_is_refused_by_its_method(folder, asked, method):
    config = Path(folder / "config.json")
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, "quantization_config": None}))
    read(folder)
    config.write_text(json.dumps({**content, "quantization_config": asked}))
    with pytest.raises(ConfigError, match=rf"'{folder}' is quantized with {method}, which is not supported; give"):
        read(folder)
