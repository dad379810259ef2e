"""A transformers model folder provides tokenizer, end token and vocabulary size; none of its code runs."""

import json
import os

import pytest
from support.composition import configure
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from foundry.config.build import build
from foundry.core.errors import ConfigError
from foundry.data.corpora.text import text_files
from foundry.data.corpora.tokenizer import load_tokenizer

SPECIAL = ["<pad>", "</s>", "<|endoftext|>", "<|stop|>", "<|turn|>"]


def byte_level(special=SPECIAL):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the dog runs"] * 9, trainer)
    return tokenizer


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """Save a Llama with 300 embeddings and 64 positions, and a smaller tokenizer whose end token is <|stop|>."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=300, max_position_embeddings=64, num_key_value_heads=2, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|stop|>").save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("files", "end"),
    [
        ({"tokenizer_config.json": {"eos_token": "<|stop|>"}}, "<|stop|>"),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|turn|>", "special": True}}}, "<|turn|>"),
        ({"special_tokens_map.json": {"eos_token": "<|stop|>"}}, "<|stop|>"),
        ({"tokenizer_config.json": {"eos_token": None}, "special_tokens_map.json": {"eos_token": "</s>"}}, "</s>"),
        ({"generation_config.json": {"eos_token_id": 3}}, "<|stop|>"),
        ({"generation_config.json": {"eos_token_id": [4, 3]}}, "<|turn|>"),
        ({"config.json": {"eos_token_id": 0}}, "<pad>"),
        ({"config.json": {"text_config": {"eos_token_id": 4}}}, "<|turn|>"),
        ({"config.json": {"eos_token_id": 0}, "tokenizer_config.json": {"eos_token": "<|stop|>"}}, "<|stop|>"),
        ({"config.json": {"eos_token_id": None}}, "<|endoftext|>"),
        ({}, "<|endoftext|>"),
    ],
)
def test_documents_end_with_the_eos_token_that_the_folder_declares(tmp_path, files, end):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "texts").mkdir()
    for number in range(10):
        (tmp_path / "texts" / f"{number}.txt").write_text("the dog runs over the hill")
    for given in (tmp_path, tmp_path / "tokenizer.json"):
        splits = text_files(
            seed=0, path=str(tmp_path / "texts"), seq_len=8, vocab_size=300, tokenizer=str(given), held_out=0.2,
            cache_dir=str(tmp_path / "cache"),
        )  # fmt: skip
        token = splits.tokenizer.token_to_id(end)
        assert (splits.train.tokens == token).sum() == 8
        assert splits.train.tokens[-1] == token


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"tokenizer_config.json": {"eos_token": "<none>"}}, "declares the end-of-sequence token '<none>'"),
        ({"generation_config.json": {"eos_token_id": 999}}, "declares the end-of-sequence token 999"),
        ({"generation_config.json": {"eos_token_id": -1}}, "declares the end-of-sequence token -1"),
        ({"config.json": {"vocab_size": 100}}, "entries but a model of 100"),
        ({"tokenizer_config.json": "{"}, "cannot be read as JSON"),
        ({"tokenizer_config.json": "[1]"}, "cannot be read as JSON"),
    ],
)
def test_contradictory_model_folder_is_a_one_line_config_error(tmp_path, files, named):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError) as refused:
        load_tokenizer(str(tmp_path), 300)
    (violation,) = refused.value.violations
    assert violation.key == "data.tokenizer"
    assert named in violation.message
    assert "\n" not in violation.message


@pytest.mark.long
def test_model_path_sets_tokenizer_and_vocab_size(model_folder, tmp_path):
    config = configure("model=hf", f"model.path={model_folder}", "data.seq_len=16", f"data.cache_dir={tmp_path}")
    assert (config.data.tokenizer, config.data.vocab_size, config.model.vocab_size) == (str(model_folder), 300, 300)
    data = build(config.data, seed=0)
    assert data.train.tokens[-1] == data.tokenizer.token_to_id("<|stop|>")
    assert build(config.model).config.vocab_size == 300


@pytest.mark.parametrize("overrides", [[], ["model=hf_llama"], ["model=hf_gpt2"]])
def test_tokenizer_is_trained_if_no_model_path_is_given(overrides):
    data = configure(*overrides).data
    assert (data.tokenizer, data.vocab_size) == (None, 4096)


@pytest.mark.parametrize(
    ("overrides", "key", "named"),
    [
        (["data.vocab_size=301"], "data.vocab_size", "is 301 but the model in"),
        (["data.seq_len=65"], "data.seq_len", "has 64 positions"),
        (["data.tokenizer=null", "data.vocab_size=256"], "data.vocab_size", "at least 257"),
    ],
)
def test_sizes_that_contradict_the_model_folder_are_refused_by_compose(model_folder, overrides, key, named):
    with pytest.raises(ConfigError) as refused:
        configure("model=hf", f"model.path={model_folder}", "data.seq_len=16", *overrides)
    (violation,) = refused.value.violations
    assert violation.key == key
    assert named in violation.message


def test_tokenizer_larger_than_its_model_is_refused_with_a_remedy(model_folder, tmp_path):
    folder = tmp_path / "smaller"
    folder.mkdir()
    for file in model_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"vocab_size": 261}))
    config = configure("model=hf", f"model.path={folder}", "data.seq_len=16", f"data.cache_dir={tmp_path}")
    with pytest.raises(ConfigError) as refused:
        build(config.data, seed=0)
    (violation,) = refused.value.violations
    assert "270 entries but a model of 261" in violation.message
    assert "resize_token_embeddings(270)" in violation.message


@pytest.mark.parametrize("weights", ["pickled", "broken", "none"])
def test_model_weights_are_never_unpickled(model_folder, tmp_path, weights):
    import torch

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    if weights == "pickled":
        torch.save({"weight": Marks(str(tmp_path / "ran"))}, folder / "pytorch_model.bin")
    elif weights == "broken":
        (folder / "model.safetensors").write_bytes((model_folder / "model.safetensors").read_bytes()[:100])
    config = configure("model=hf", f"model.path={folder}", "data.seq_len=16", "data.tokenizer=null")
    with pytest.raises(ConfigError) as refused:
        build(config.model)
    (violation,) = refused.value.violations
    assert violation.key == "model.path"
    assert "\n" not in violation.message
    assert not (tmp_path / "ran").exists()


class Marks:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)
