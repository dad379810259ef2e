"""Exports generate the same completions in transformers as the run in foundry, and stop at the end token."""

import json

import pytest
import torch
from support.composition import configure
from support.samples import read_samples
from support.tiny import SMALL_LM
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from foundry.commands.export import ExportOptions, export
from foundry.commands.sample import SampleOptions, sample
from foundry.engine.train import train

QUIET = ["tracking=none", "tracking.progress=false", "evaluation.write_samples=false"]
HF = "'+model.config={hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4}'"
KINDS = {
    "transformer": SMALL_LM,
    "hf_llama": ["debug=fast", "data.seq_len=32", "model=hf_llama", HF.strip("'").removeprefix("+").replace(" ", "")],
}


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """A file with 60 copies of each of two chats, so that a tiny model memorizes them."""
    file = tmp_path_factory.mktemp("data") / "chats.jsonl"
    rows = [{"prompt": f"Count {name}", "completion": f"It is {name}."} for name in ("one", "two") for _ in range(60)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module", params=["transformer", pytest.param("hf_llama", marks=pytest.mark.long)])
def exported(request, chats, cache, tmp_path_factory):
    """A folder with a run on chats and its export."""
    folder = tmp_path_factory.mktemp(request.param)
    data = ["data=chats", f"data.path={chats}", f"data.cache_dir={cache}", "data.vocab_size=280"]
    objective = ["objective=sft", "precision=fp32"]
    budget = ["hparams.max_steps=80", "hparams.lr=0.01", "evaluation.interval=null"]
    batches = ["hparams.global_batch_size=16", "hparams.per_gpu_batch_size=16"]
    train(configure(*KINDS[request.param], *QUIET, *data, *objective, *budget, *batches), folder / "run")
    export(ExportOptions(run=str(folder / "run"), out=str(folder / "hf")))
    return folder


def test_generate_of_an_export_stops_and_matches_foundry_sample(exported):
    model = AutoModelForCausalLM.from_pretrained(exported / "hf").eval()
    tokenizer = AutoTokenizer.from_pretrained(exported / "hf")
    for name in ("one", "two"):
        chat = [{"role": "user", "content": f"Count {name}"}]
        tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            theirs = model.generate(**tokens, do_sample=False, max_new_tokens=12)[0]
        given = {"prompt": chat[0]["content"], "temperature": 0, "max_new_tokens": 12, "out": str(exported / name)}
        [ours] = read_samples(sample(SampleOptions(run=str(exported / "run"), **given)))
        assert tokenizer.decode(theirs, skip_special_tokens=True) == ours
        assert ours == f"user: Count {name}\nassistant: It is {name}."
        assert theirs[-1] == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id is not None


def test_generate_of_an_export_pads_batches_and_stops_each_row_separately(exported):
    model = AutoModelForCausalLM.from_pretrained(exported / "hf").eval()
    tokenizer = AutoTokenizer.from_pretrained(exported / "hf", padding_side="left")
    texts = ["user: Count one\nassistant: ", "one user: Count two\nassistant: "]
    tokens = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    found = tokenizer.batch_decode(model.generate(**tokens, max_new_tokens=12), skip_special_tokens=True)
    options = {"temperature": 0, "max_new_tokens": 12, "chat": False, "out": str(exported / "both")}
    assert read_samples(sample(SampleOptions(run=str(exported / "run"), prompts=texts, **options))) == found


def test_export_declares_special_tokens_and_chat_template(exported):
    settings = GenerationConfig.from_pretrained(exported / "hf")
    tokenizer = AutoTokenizer.from_pretrained(exported / "hf")
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert (settings.eos_token_id, settings.pad_token_id, settings.bos_token_id) == (end, end, end)
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|endoftext|>",) * 3
    assert tokenizer.chat_template == (exported / "run" / "chat_template.jinja").read_text()
    assert json.loads((exported / "hf" / "config.json").read_text())["eos_token_id"] == end
    assert tokenizer("Count one")["input_ids"][0] != end, "nothing is put before a text"
