"""Causal language models of each transformers family are trained, exported, and loaded by transformers alone."""

import json

import pytest
import torch
from support.composition import configure
from support.small_text import RUN, write_text
from transformers import AutoModelForCausalLM, AutoTokenizer

from foundry.commands.export import ExportOptions, export
from foundry.engine.restore import restore
from foundry.engine.train import train

_SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
_GROUPED = {**_SIZES, "num_key_value_heads": 1}
_HEADS = {**_GROUPED, "head_dim": 8}
_GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2}
_RECURRENT = {"hidden_size": 16, "num_hidden_layers": 2}
FAMILIES = {
    "bloom": {"hidden_size": 16, "n_layer": 2, "n_head": 2},
    "cohere": _GROUPED,
    "falcon": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    "gemma": _HEADS,
    "gemma2": {**_HEADS, "sliding_window": 8},
    "gemma3_text": {**_HEADS, "sliding_window": 8},
    "gpt2": _GPT,
    "gpt_neo": {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]},
    "gpt_neox": _SIZES,
    "llama": _GROUPED,
    "mamba": {**_RECURRENT, "state_size": 4},
    "mamba2": {**_RECURRENT, "state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "mistral": {**_GROUPED, "sliding_window": 8},
    "mixtral": {**_GROUPED, "num_local_experts": 2},
    "mpt": {"d_model": 16, "n_layers": 2, "n_heads": 2},
    "olmo": _GROUPED,
    "olmo2": _GROUPED,
    "opt": {**_RECURRENT, "ffn_dim": 24, "num_attention_heads": 2, "word_embed_proj_dim": 16},
    "phi": _GROUPED,
    "phi3": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": _HEADS,
    "rwkv": {**_RECURRENT, "attention_hidden_size": 16, "context_length": 16},
    "stablelm": _GROUPED,
    "starcoder2": _GROUPED,
}
_ALWAYS = ("rwkv",)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in _ALWAYS else pytest.mark.long) for name in FAMILIES]
)
def test_transformers_family_trains_exports_and_loads_with_the_same_logits(family, tmp_path, cache):
    config = json.dumps(FAMILIES[family]).replace('"', "")
    given = [f"model.architecture={family}", f"+model.config={config}", f"data.cache_dir={cache}"]
    steps = ["hparams.max_steps=2", "evaluation.interval=null", "checkpoint.interval=null", "hparams.lr=0.01"]
    train(configure("model=hf", *given, *RUN, write_text(tmp_path), *steps), tmp_path / "run")
    export(ExportOptions(run=str(tmp_path / "run"), out=str(tmp_path / "hf")))
    load = AutoModelForCausalLM.from_pretrained
    model, wrong = load(tmp_path / "hf", local_files_only=True, output_loading_info=True)
    assert not any(wrong.values())
    tokens = torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        trained = restore(tmp_path / "run", "last", ema=True).model(tokens).logits
        assert model.eval()(tokens).logits.equal(trained)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"] == [type(model).__name__]
    prompt = AutoTokenizer.from_pretrained(tmp_path / "hf")("2 times", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=2, do_sample=False).shape[1] <= prompt["input_ids"].shape[1] + 2


def test_mixtral_warns_of_the_unused_router_loss_and_is_sampled(tmp_path, cache, caplog):
    config = json.dumps({**FAMILIES["mixtral"], "output_router_logits": True}).replace('"', "")
    given = ["model.architecture=mixtral", f"+model.config={config}", f"data.cache_dir={cache}"]
    steps = [
        "hparams.max_steps=2",
        "evaluation.interval=null",
        "checkpoint.interval=null",
        "evaluation.write_samples=true",
    ]
    train(configure("model=hf", *given, *RUN, write_text(tmp_path), *steps), tmp_path / "run")
    (line,) = [text for text in caplog.messages if "output_router_logits=true" in text]
    assert "mixtral" in line
    assert (tmp_path / "run" / "plots" / "samples.txt").read_text()
    model = restore(tmp_path / "run", "last", ema=True).model
    assert model.hf_config().output_router_logits is True
    assert model.causal_lm.config.output_router_logits is False
