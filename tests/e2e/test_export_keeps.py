"""Exports keep the tokenizer and generation settings of the model's source folder; other programs load them."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from safetensors import safe_open
from support.composition import configure
from support.small_text import RUN, SMALL, write_text
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    pipeline,
)

from foundry.commands.export import ExportOptions, export
from foundry.config.schemas.precision import WeightsDtype
from foundry.engine.train import train

SPECIAL = ["<|pad|>", "<|begin|>", "<|end|>", "<|turn|>", "<|call|>"]
TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|turn|>' }}{% endfor %}"
FEW = ["hparams.max_steps=2", "checkpoint.interval=null", "evaluation.interval=null", "data.seq_len=32"]
LORA = ["peft=lora", "optimizer=adamw"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A transformers folder with unusual settings of tokenizer and generation."""
    folder = tmp_path_factory.mktemp("source") / "llama"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["7 times 7 is 49."] * 9, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 1)])
    named = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **named,
        additional_special_tokens=["<|call|>"],
        padding_side="left",
        truncation_side="left",
        model_max_length=48,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    (folder / "merges.txt").write_text("#version: 0.2\n")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = LlamaConfig(vocab_size=300, max_position_embeddings=64, num_key_value_heads=2, **sizes, **ids)
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    GenerationConfig(eos_token_id=[2, 3], pad_token_id=0, do_sample=True, temperature=0.7, top_p=0.8).save_pretrained(
        folder
    )
    return folder


def run_on(folder, tmp_path, cache, *overrides):
    words = [write_text(tmp_path), f"data.cache_dir={cache}"]
    train(configure("model=base", f"model.path={folder}", *RUN, *FEW, *words, *overrides), tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def exported(source, cache, tmp_path_factory):
    """The export of a run that started from a copy of `source`; the copy is moved away before the export."""
    folder = tmp_path_factory.mktemp("exported")
    gone = folder / "gone"
    gone.mkdir()
    for file in source.iterdir():
        (gone / file.name).write_bytes(file.read_bytes())
    run = run_on(gone, folder, cache)
    gone.rename(folder / "elsewhere")
    export(ExportOptions(run=str(run), out=str(folder / "hf")))
    return folder / "hf"


def test_export_keeps_the_tokenizer_of_the_source_folder(source, exported):
    one, other = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(exported)
    for name in ("special_tokens_map", "padding_side", "truncation_side", "model_max_length", "chat_template"):
        assert getattr(other, name) == getattr(one, name)
    texts = ["7 times 7", "a longer text, it is<|call|>", "e\u0301"]
    assert other(texts, padding=True).data == one(texts, padding=True).data
    assert other("7")["input_ids"][0] == 1
    chat = [{"role": "user", "content": "7?"}]
    assert other.apply_chat_template(chat) == one.apply_chat_template(chat)
    assert (exported / "merges.txt").read_text() == "#version: 0.2\n"


def test_export_keeps_generation_settings_and_dtype_of_the_source_folder(exported):
    found = GenerationConfig.from_pretrained(exported)
    assert (found.do_sample, found.temperature, found.top_p) == (True, 0.7, 0.8)
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (1, [2, 3], 0)
    config = json.loads((exported / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "bfloat16")
    with safe_open(exported / "model.safetensors", "pt") as file:
        assert {str(file.get_tensor(name).dtype) for name in file.keys()} == {"torch.bfloat16"}  # noqa: SIM118
    export(
        ExportOptions(run=str(exported.parent / "run"), out=str(exported.parent / "fp32"), dtype=WeightsDtype.float32)
    )
    assert AutoModelForCausalLM.from_pretrained(exported.parent / "fp32").dtype == torch.float32


@pytest.mark.long
def test_adapter_export_keeps_the_tokenizer_of_the_source_folder(source, cache, tmp_path):
    run = run_on(source, tmp_path, cache, *LORA)
    export(ExportOptions(run=str(run), out=str(tmp_path / "adapter")))
    one, other = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(tmp_path / "adapter")
    assert (other.special_tokens_map, other.padding_side) == (one.special_tokens_map, "left")
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: peft\n")
    assert f'base = AutoModelForCausalLM.from_pretrained("{source}")' in card


@pytest.mark.long
def test_run_copies_tokenizer_files_from_a_hub_folder_of_symlinks(source, cache, tmp_path):
    snapshot, blobs = tmp_path / "models--x--y" / "snapshots" / "0a1b", tmp_path / "models--x--y" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in source.iterdir():
        (blobs / f"blob-{file.name}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/blob-{file.name}")
    run = run_on(snapshot, tmp_path, cache)
    assert not (run / "transformers" / "tokenizer_config.json").is_symlink()
    assert json.loads((run / "transformers" / "tokenizer_config.json").read_text())["padding_side"] == "left"


def test_exported_foundry_tokenizer_pads_left_and_has_a_maximum_length(own):
    tokenizer, model = AutoTokenizer.from_pretrained(own), AutoModelForCausalLM.from_pretrained(own)
    assert (tokenizer.padding_side, tokenizer.model_max_length) == ("left", 32)
    assert json.loads((own / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    batch = tokenizer(["7 times", "11 times 11 is"], return_tensors="pt", padding=True)
    whole = model.generate(**batch, max_new_tokens=6, do_sample=False)
    alone = model.generate(**tokenizer("7 times", return_tensors="pt"), max_new_tokens=6, do_sample=False)
    assert whole[0, batch["input_ids"].shape[1] :].tolist() == alone[0, -6:].tolist()


@pytest.fixture(scope="module")
def own(cache, tmp_path_factory):
    """The export of a run with a model and a tokenizer trained by foundry."""
    folder = tmp_path_factory.mktemp("own")
    words = [write_text(folder), f"data.cache_dir={cache}"]
    train(configure(*SMALL, *RUN, *FEW, *words), folder / "run")
    (folder / "run" / ".hydra").mkdir()
    given = ["data=text", "+tracking.trackers.mine.api_key=hunter22hunter22"]
    (folder / "run" / ".hydra" / "overrides.yaml").write_text(json.dumps(given))
    export(ExportOptions(run=str(folder / "run"), out=str(folder / "hf")))
    return folder / "hf"


def test_text_generation_pipeline_loads_an_export(own):
    write = pipeline("text-generation", model=str(own))
    (found,) = write("7 times", max_new_tokens=4, do_sample=False)
    assert found["generated_text"].startswith("7 times")


def test_model_card_of_an_export_has_metrics_and_settings_but_no_secret(own):
    card = (own / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\n")
    result = json.loads((own.parent / "run" / "result.json").read_text())
    assert f"| val_loss | {result['val_loss']:.6g} |" in card
    assert "| hparams.global_batch_size | 4 |" in card
    assert "| data | text_files |" in card
    assert "python -m foundry data=text +tracking.trackers.mine.api_key=" in card.replace("'", "")
    assert "hunter22" not in card


TASK = """\
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["49", "50"]
doc_to_target: answer
metric_list: [{metric: acc}]
"""


@pytest.mark.long
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm_eval is not installed")
def test_lm_eval_command_evaluates_an_export(own, tmp_path):
    rows = [{"question": "7 times 7 is ", "answer": 0}, {"question": "5 times 10 is ", "answer": 1}]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sums.yaml").write_text(TASK.replace("FILE", str(tmp_path / "sums.jsonl")))
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={own}", "--device", "cpu"]
    command += ["--tasks", "sums", "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]
    alone = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(tmp_path / "cache"),
    }
    subprocess.run(command, check=True, cwd=tmp_path, timeout=300, env=os.environ | alone)
    (file,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(file.read_text())["results"]["sums"]["acc,none"] in (0.0, 0.5, 1.0)
