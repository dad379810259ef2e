"""Tokenizer and generation files of exports, from sources with invalid token ids and custom code."""

import json
import logging

import pytest
from transformers import AutoTokenizer, LlamaConfig, Qwen2Config

from foundry.data.corpora.tokenizer import train_tokenizer
from foundry.data.splits import DataSplits
from foundry.engine.transformers_files import save_for_transformers
from foundry.run_dir.strict_json import DamagedFileError


def splits(**other):
    return DataSplits(train=[], validation=[], fingerprint="", tokenizer=train_tokenizer(["it's"], 300), **other)


def write(folder, **files):
    folder.mkdir()
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def read(file):
    return json.loads(file.read_text())


def test_invalid_token_ids_and_custom_code_are_not_exported(tmp_path):
    generation = {"eos_token_id": [0, 999, "x"], "pad_token_id": -1, "temperature": 0.5, "top_k": None}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    settings |= {"tokenizer_file": "/home/somebody/tokenizer.json", "model_max_length": 77}
    source = write(tmp_path / "source", generation_config=generation, tokenizer_config=settings)
    (tmp_path / "out").mkdir()
    save_for_transformers(LlamaConfig(pad_token_id=-1), splits(stop_ids=(0,)), source, tmp_path / "out")
    ids = {"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0}
    assert read(tmp_path / "out" / "generation_config.json") == {"temperature": 0.5, **ids}
    written = read(tmp_path / "out" / "tokenizer_config.json")
    named = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    assert written == {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 77, **named}
    assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == 77


def test_damaged_source_file_is_named(tmp_path):
    source = write(tmp_path / "source", tokenizer_config=[])
    with pytest.raises(DamagedFileError, match=r"tokenizer_config\.json contains no JSON object"):
        save_for_transformers(LlamaConfig(), splits(), source, tmp_path)


def test_tokenizer_class_that_splits_differently_is_warned_of(tmp_path, caplog):
    save_for_transformers(Qwen2Config(), splits(stop_ids=(0,)), tmp_path / "none", tmp_path)
    assert "AutoTokenizer loads a Qwen2Tokenizer from" in caplog.text
    caplog.clear()
    save_for_transformers(LlamaConfig(), splits(stop_ids=(0,)), tmp_path / "none", tmp_path)
    assert caplog.text == ""


def test_export_of_a_short_context_model_logs_no_warning(tmp_path, caplog):
    theirs = logging.getLogger("transformers")
    theirs.addHandler(caplog.handler)
    save_for_transformers(LlamaConfig(max_position_embeddings=8), splits(stop_ids=(0,)), tmp_path / "none", tmp_path)
    theirs.removeHandler(caplog.handler)
    assert caplog.text == ""
    assert read(tmp_path / "tokenizer_config.json")["model_max_length"] == 8


BASES = {
    "all": ({"bos_token_id": 1, "pad_token_id": 2}, {"bos_token_id": 1, "pad_token_id": 2}),
    "no first": ({"bos_token_id": None, "pad_token_id": 2}, {"pad_token_id": 2}),
    "no padding": ({"bos_token_id": 1, "pad_token_id": None}, {"bos_token_id": 1}),
    "neither": ({"bos_token_id": None, "pad_token_id": None}, {}),
    "nor an end": ({"bos_token_id": None, "pad_token_id": None, "eos_token_id": None}, {}),
    "wrong": ({"bos_token_id": None, "pad_token_id": -1}, {"pad_token_id": 0}),
}


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("settings", [{}, {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None}])
def test_null_special_tokens_of_a_base_stay_null(name, settings, tmp_path):
    ids, expected = BASES[name]
    files = {"config": {}} | ({"tokenizer_config": settings} if settings else {})
    source = write(tmp_path / "source", **files)
    (tmp_path / "out").mkdir()
    save_for_transformers(LlamaConfig(**ids), splits(stop_ids=(0,)), source, tmp_path / "out")
    assert read(tmp_path / "out" / "generation_config.json") == {"eos_token_id": 0, **expected}
    found = LlamaConfig.from_pretrained(tmp_path / "out")
    assert (found.bos_token_id, found.pad_token_id) == (expected.get("bos_token_id"), expected.get("pad_token_id"))
    tokens = read(tmp_path / "out" / "tokenizer_config.json")
    assert (tokens.get("bos_token") is None) == (bool(settings) or "bos_token_id" not in expected)
    assert (tokens.get("pad_token") is None) == ("pad_token_id" not in expected)


def test_new_model_uses_its_end_token_for_bos_and_padding(tmp_path):
    save_for_transformers(
        LlamaConfig(bos_token_id=None, pad_token_id=None), splits(stop_ids=(0,)), tmp_path / "none", tmp_path
    )
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    assert read(tmp_path / "generation_config.json") == ids
