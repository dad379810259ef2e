"""A run that starts from another run, or from a folder of transformers, and is opened when that is gone."""

import shutil

import pytest
import torch
from composition import configure
from tiny import SMALL_LM
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from foundry.config.errors import ConfigError
from foundry.export import ExportOptions, export
from foundry.restore import restore
from foundry.train import train

QUIET = ["tracking=none", "tracking.progress=false", "evaluation.write_samples=false", "hparams.max_steps=1"]
FEW = ["debug=fast", "data.seq_len=32", *QUIET]
STILL = ["hparams.lr=1e-30", "scheduler.warmup='0'", "optimizer.weight_decay=0"]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """The run directory of a tiny language model."""
    folder = tmp_path_factory.mktemp("pretrained") / "base"
    train(configure(*SMALL_LM, *QUIET, "hparams.lr=0.01"), folder)
    return folder


def weights(folder, which="last"):
    return restore(folder, which, ema=True).model.state_dict()


def is_same(one, other):
    return one.keys() == other.keys() and all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)


def test_a_tuned_run_starts_with_the_weights_and_opens_without_its_base(pretrained, tmp_path):
    base = shutil.copytree(pretrained, tmp_path / "base", symlinks=True)
    train(configure("model=base", f"model.path={base}", *FEW, *STILL), tmp_path / "tuned")
    before = weights(base)
    assert (tmp_path / "tuned" / "tokenizer.json").read_text() == (base / "tokenizer.json").read_text()
    shutil.rmtree(base)
    assert is_same(weights(tmp_path / "tuned"), before)
    export(ExportOptions(run=str(tmp_path / "tuned"), out=str(tmp_path / "hf")))
    train(configure("model=base", f"model.path={tmp_path / 'hf'}", *FEW, *STILL), tmp_path / "from_hf")
    shutil.rmtree(tmp_path / "hf")
    # What was an export is the base of a run, and that of another.
    train(configure("model=base", f"model.path={tmp_path / 'from_hf'}", *FEW, *STILL), tmp_path / "again")
    shutil.rmtree(tmp_path / "from_hf")
    found = {name.removeprefix("causal_lm."): value for name, value in weights(tmp_path / "again").items()}
    assert is_same(found, before)


@pytest.mark.parametrize("start", ["", "checkpoints/latest"])
def test_weights_are_not_trained_on_with_another_tokenizer(pretrained, tmp_path, start):
    overrides = [*SMALL_LM, *QUIET, f"model.init_from={pretrained / start}", "model.vocab_size=4096"]
    with pytest.raises(ConfigError) as refused:
        train(configure(*overrides, "data.vocab_size=300"), tmp_path / "run")
    message = str(refused.value)
    assert message.startswith("data.tokenizer: is not the one that the weights in ")
    assert message.endswith(f"set data.tokenizer={pretrained / 'tokenizer.json'}")
    train(configure(*overrides, f"data.tokenizer={pretrained / 'tokenizer.json'}"), tmp_path / "run")


def test_nor_a_folder_of_transformers(pretrained, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=4096, num_key_value_heads=2, **sizes)).save_pretrained(tmp_path / "hf")
    other = PreTrainedTokenizerFast(tokenizer_file=str(pretrained / "tokenizer.json"))
    other.add_tokens(["<|own|>"])
    other.save_pretrained(tmp_path / "hf")
    given = f"data.tokenizer={pretrained / 'tokenizer.json'}"
    with pytest.raises(ConfigError, match=r"^data\.tokenizer: is not the one that the weights in "):
        train(configure("model=base", f"model.path={tmp_path / 'hf'}", given, *FEW), tmp_path / "run")
