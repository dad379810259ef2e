"""Runs with model=base start from another run or a transformers folder, and are readable after its deletion."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from support.composition import configure
from support.outcome import outcome
from support.small_text import RUN, SMALL, write_text
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from foundry.commands.export import ExportOptions, export
from foundry.core.errors import ConfigError
from foundry.engine.restore import restore
from foundry.engine.train import train
from foundry.run_dir.checkpoints import list_checkpoints

QUIET = ["tracking=none", "tracking.log_every_n_steps=1", "hparams.global_batch_size=4", "hparams.per_gpu_batch_size=2"]
STILL = ["hparams.lr=1e-30", "scheduler.warmup='0'", "optimizer.weight_decay=0"]


@pytest.fixture(scope="module")
def one_step(tmp_path_factory, cache):
    """Overrides of a run of one step on a small text."""
    given = [write_text(tmp_path_factory.mktemp("text")), f"data.cache_dir={cache}"]
    return [*RUN, *given, "data.seq_len=32", "hparams.max_steps=1", "checkpoint.interval=1"]


@pytest.fixture(scope="module")
def pretrained(one_step, tmp_path_factory):
    """The run directory of a tiny language model."""
    folder = tmp_path_factory.mktemp("pretrained") / "base"
    train(configure(*SMALL, *one_step, "hparams.lr=0.01"), folder)
    return folder


def weights(folder, which="last"):
    return restore(folder, which, ema=True).model.state_dict()


def is_same(one, other):
    return one.keys() == other.keys() and all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)


def test_fine_tuned_run_starts_from_base_weights_and_opens_without_base(pretrained, one_step, tmp_path):
    base = shutil.copytree(pretrained, tmp_path / "base", symlinks=True)
    train(configure("model=base", f"model.path={base}", *one_step, *STILL), tmp_path / "tuned")
    before = weights(base)
    assert (tmp_path / "tuned" / "tokenizer.json").read_text() == (base / "tokenizer.json").read_text()
    shutil.rmtree(base)
    assert is_same(weights(tmp_path / "tuned"), before)
    export(ExportOptions(run=str(tmp_path / "tuned"), out=str(tmp_path / "hf")))
    train(configure("model=base", f"model.path={tmp_path / 'hf'}", *one_step, *STILL), tmp_path / "from_hf")
    shutil.rmtree(tmp_path / "hf")
    # The export is the base of a run, which is the base of another run.
    train(configure("model=base", f"model.path={tmp_path / 'from_hf'}", *one_step, *STILL), tmp_path / "again")
    shutil.rmtree(tmp_path / "from_hf")
    found = {name.removeprefix("causal_lm."): value for name, value in weights(tmp_path / "again").items()}
    assert is_same(found, before)


def test_supervised_fine_tuning_resumes_bit_for_bit(pretrained, tmp_path, cache):
    # Checkpoints hold all the random state: dropout and the samples use no other source of randomness.
    file = tmp_path / "chats.jsonl"
    rows = [{"prompt": f"Count {number}", "completion": f"{number}."} for number in range(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tuned = [*QUIET, "model=base", f"model.path={pretrained}", "data=chats", f"data.path={file}", "objective=sft"]
    dropout = ["objective.hidden_dropout=0.1", "objective.attention_dropout=0.1", "evaluation.write_samples=true"]
    steps = ["data.seq_len=32", "data.packing=true", f"data.cache_dir={cache}"]
    steps += ["hparams.max_steps=4", "checkpoint.interval=2"]
    config = configure(*tuned, *dropout, *steps)
    train(config, tmp_path / "whole")
    broken_off = shutil.copytree(tmp_path / "whole", tmp_path / "broken_off", symlinks=True)
    shutil.rmtree(list_checkpoints(broken_off)[0])
    (broken_off / "result.json").unlink()
    train(config, broken_off)
    assert outcome(broken_off) == outcome(tmp_path / "whole")
    page = (broken_off / "plots" / "samples.txt").read_text()
    assert page.startswith("step 4, temperature 0")
    assert page.split("--- prompt ", 1)[1].partition("\n")[2].startswith("user: Count ")


@pytest.mark.parametrize("start", ["", pytest.param("checkpoints/latest", marks=pytest.mark.long)])
def test_init_from_a_run_refuses_another_tokenizer(pretrained, one_step, tmp_path, start):
    overrides = [*SMALL, *one_step, f"model.init_from={pretrained / start}", "model.vocab_size=300"]
    with pytest.raises(ConfigError) as refused:
        train(configure(*overrides, "data.vocab_size=299"), tmp_path / "run")
    message = str(refused.value)
    assert message.startswith("data.tokenizer: differs from the tokenizer that the weights in ")
    assert message.endswith(f"set data.tokenizer={pretrained / 'tokenizer.json'}")
    train(configure(*overrides, f"data.tokenizer={pretrained / 'tokenizer.json'}"), tmp_path / "run")


def test_init_from_a_checkpoint_deleted_after_composition_is_refused(pretrained, one_step, tmp_path):
    base = shutil.copytree(pretrained, tmp_path / "base", symlinks=True)
    config = configure("model=base", f"model.path={base}", *one_step)
    Path(config.model.init_from).rename(base / "checkpoints" / "step_00000002")
    with pytest.raises(ConfigError) as refused:
        train(config, tmp_path / "run")
    assert str(refused.value).startswith(f"model.init_from: is {config.model.init_from}, which no longer exists: its")
    assert "start again" in str(refused.value)


def test_init_from_a_transformers_folder_refuses_another_tokenizer(pretrained, one_step, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=300, num_key_value_heads=2, **sizes)).save_pretrained(tmp_path / "hf")
    other = PreTrainedTokenizerFast(tokenizer_file=str(pretrained / "tokenizer.json"))
    other.add_tokens(["<|own|>"])
    other.save_pretrained(tmp_path / "hf")
    given = f"data.tokenizer={pretrained / 'tokenizer.json'}"
    with pytest.raises(ConfigError, match=r"^data\.tokenizer: differs from the tokenizer that the weights in "):
        train(configure("model=base", f"model.path={tmp_path / 'hf'}", given, *one_step), tmp_path / "run")
