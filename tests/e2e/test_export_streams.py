"""An export reads the checkpoint one tensor at a time and writes the same bytes as from the whole model."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoint_parts import KNOWN, saver
from support.composition import configure
from support.tiny import SMALL_LM

from foundry.checkpoint.tensors import collect
from foundry.commands.export import ExportOptions, export
from foundry.config.record.frozen import save_config
from foundry.config.schemas.precision import WeightsDtype
from foundry.core.ema import WeightAverage
from foundry.core.errors import ConfigError
from foundry.core.model_hooks import hook
from foundry.data.corpora.tokenizer import train_tokenizer
from foundry.engine.restore import restore
from foundry.parts.model import build_model
from foundry.run_dir.names import PLAN, TOKENIZER

HF = "+model.config={hidden_size:32,intermediate_size:64,num_hidden_layers:2,num_attention_heads:4}"
KINDS = {
    "transformer": SMALL_LM,
    "tied": [*SMALL_LM, "model.tie_embeddings=true"],
    "hf_llama": ["debug=fast", "data.seq_len=32", "model=hf_llama", HF.removeprefix("+")],
}


def make_run(folder, *overrides, ema=False):
    """Write a run directory with all the files that an export reads, without training."""
    folder.mkdir()
    config = configure(*overrides)
    save_config(config, folder)
    train_tokenizer(["a text"], 300).save(str(folder / TOKENIZER))
    (folder / PLAN).write_text(json.dumps({"tokens_per_sample": 32}))
    torch.manual_seed(1)
    model = build_model(config)
    average = WeightAverage(model, 0.5) if ema else None
    if average is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        average.update()
    saver(folder).write(1, tensors=lambda: collect(model, average, []), manifest=KNOWN, rank_state={}, wait=True)
    return folder


@pytest.mark.parametrize("ema", [False, True])
@pytest.mark.parametrize("kind", ["transformer", "tied", pytest.param("hf_llama", marks=pytest.mark.long)])
def test_streamed_export_is_byte_identical_to_saving_the_whole_model(tmp_path, kind, ema):
    run = make_run(tmp_path / "run", *KINDS[kind], ema=ema)
    export(ExportOptions(run=str(run), out=str(tmp_path / "out")))
    model = restore(run, "last", ema=True).model
    save_file(hook(model, "export_state")(model.state_dict()), tmp_path / "whole", metadata={"format": "pt"})
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "whole").read_bytes()


def test_export_dtype_converts_the_weights(tmp_path):
    run = make_run(tmp_path / "run", *SMALL_LM)
    export(ExportOptions(run=str(run), out=str(tmp_path / "out"), dtype=WeightsDtype.bfloat16))
    written = load_file(tmp_path / "out" / "model.safetensors")
    whole = restore(run, "last", ema=True).model.state_dict()
    narrow = restore(run, "last", ema=True, dtype=torch.bfloat16).model.state_dict()
    assert all(tensor.equal(whole[name].bfloat16()) and tensor.equal(narrow[name]) for name, tensor in written.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("name", "value", "default"),
    [("residual_scalars", "true", "false"), ("value_embeddings", "[0]", "[]"), ("logit_softcap", "30", "null")],
)
@pytest.mark.parametrize("peft", ["none", "lora"])
def test_option_that_transformers_lacks_is_refused_before_anything_is_written(tmp_path, name, value, default, peft):
    run = make_run(tmp_path / "run", *SMALL_LM, "optimizer=adamw", f"model.{name}={value}", f"peft={peft}")
    with pytest.raises(ConfigError) as error:
        export(ExportOptions(run=str(run), out=str(tmp_path / "out")))
    assert str(error.value) == (
        f"model.{name}: is {value} but no model class of transformers has this option, so the run cannot be exported; "
        f"use it with foundry sample and foundry eval, or train a model with model.{name}={default}"
    )
    assert not (tmp_path / "out").exists()
    if peft == "none":
        assert restore(run, "last", ema=True).model(torch.zeros(1, 2, dtype=torch.int64)).logits.isfinite().all()


_MEASURED = """
import resource, sys
from foundry.commands.export import ExportOptions, export
def peak(run):
    export(ExportOptions(run=run, out=run + "-out"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
small = peak(sys.argv[1])
print(peak(sys.argv[2]) - small)
"""


@pytest.mark.long
def test_export_needs_less_memory_than_twice_the_largest_tensor(tmp_path):
    large = ["model.hidden_size=512", "model.intermediate_size=8192", "data.vocab_size=16000", "model.num_layers=5"]
    runs = [make_run(tmp_path / "small", *SMALL_LM), make_run(tmp_path / "large", *SMALL_LM, *large)]
    command = [sys.executable, "-c", _MEASURED, *map(str, runs)]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
    written = load_file(tmp_path / "large-out" / "model.safetensors")
    largest = max(tensor.nbytes for tensor in written.values())
    assert sum(tensor.nbytes for tensor in written.values()) > 8 * largest
    assert grown < 2 * largest
