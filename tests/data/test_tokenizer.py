"""Tokenizer files: ids beyond the number of tokens, and failures of the library as one-line errors."""

import json

import numpy as np
import pytest

from foundry.core.errors import ConfigError
from foundry.data.corpora.text import text_files
from foundry.data.corpora.token_cache import token_dtype
from foundry.data.corpora.tokenizer import count_ids, encode_texts, load_tokenizer, train_tokenizer
from foundry.data.splits import DataSplits

TEXT = "the dog runs over the hill and back again"
BASE = json.loads(train_tokenizer([TEXT] * 3, 270).to_str())


def write(folder, settings=(), **changes):
    content = {**BASE, **changes}
    content["model"] = {**BASE["model"], **dict(settings)}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return str(folder / "tokenizer.json")


def pattern(**choice):
    return {"type": "Replace", "pattern": choice, "content": "x"}


FAILING = {
    "empty text": {"normalizer": pattern(String="")},
    "empty expression": {"normalizer": pattern(Regex="")},
    "expression of nothing": {"normalizer": pattern(Regex="x*")},
    "chunks of nothing": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "words without an unknown one": {"settings": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<u>"}},
}


@pytest.mark.parametrize("name", FAILING)
def test_tokenizer_that_fails_to_encode_is_a_config_error(tmp_path, name):
    path = write(tmp_path, **FAILING[name])
    (tmp_path / "all.txt").write_text(TEXT * 9)
    with pytest.raises(ConfigError) as refused:
        text_files(
            seed=0,
            path=str(tmp_path / "all.txt"),
            seq_len=8,
            vocab_size=400,
            tokenizer=path,
            held_out=0.2,
            cache_dir=str(tmp_path / "cache"),
        )
    (violation,) = refused.value.violations
    assert violation.key == "data.tokenizer"
    assert "cannot encode a text: " in str(violation)
    assert str(violation).isprintable()


UNREADABLE = {
    "nothing": b"",
    "no JSON": b"{",
    "another object": b"{}",
    "no UTF-8": b"\xff",
    "deep": b"[" * 100_000,
    "an id of another type": json.dumps({**BASE, "model": {**BASE["model"], "vocab": {"a": "b"}}}).encode(),
    "a negative id": json.dumps({**BASE, "model": {**BASE["model"], "vocab": {"a": -1}}}).encode(),
    "an id of 64 bits": json.dumps({**BASE, "model": {**BASE["model"], "vocab": {"a": 2**40}}}).encode(),
    "another expression": json.dumps({**BASE, "normalizer": pattern(Regex="(")}).encode(),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_invalid_tokenizer_file_is_a_config_error(tmp_path, name):
    (tmp_path / "tokenizer.json").write_bytes(UNREADABLE[name])
    with pytest.raises(
        ConfigError, match=r"^data\.tokenizer: is .*tokenizer\.json, which the tokenizers library cannot load"
    ):
        load_tokenizer(str(tmp_path), 400)


@pytest.mark.parametrize("end", [2**40, -(2**70), 10**30, "\ud800", "nowhere", ["nowhere"], {"content": "\udfff"}])
def test_invalid_eos_token_is_a_config_error(tmp_path, end):
    path = write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": end}))
    with pytest.raises(ConfigError) as refused:
        load_tokenizer(path, 400)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(("highest", "dtype"), [(300, np.uint16), (65_535, np.uint16), (65_536, np.uint32)])
def test_highest_token_id_determines_vocab_size_and_dtype(tmp_path, highest, dtype):
    vocab = {**BASE["model"]["vocab"], "zz": highest}
    path = write(tmp_path, {"vocab": vocab, "merges": [*BASE["model"]["merges"], ["z", "z"]]})
    with pytest.raises(ConfigError, match=rf"^data\.vocab_size: .* set data\.vocab_size={highest + 1}$"):
        load_tokenizer(path, highest)
    tokenizer, _ = load_tokenizer(path, highest + 1)
    assert count_ids(tokenizer) == highest + 1
    assert token_dtype(tokenizer) == dtype
    assert encode_texts(tokenizer, ["zz"]) == [[highest]]


@pytest.mark.parametrize("stride", [0, 5])
def test_truncation_and_padding_of_a_tokenizer_are_ignored(tmp_path, stride):
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": stride}
    padding = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    plain, _ = load_tokenizer(write(tmp_path), 400)
    bounded, _ = load_tokenizer(write(tmp_path, truncation=truncation, padding=padding), 400)
    assert encode_texts(bounded, [TEXT, "a"]) == encode_texts(plain, [TEXT, "a"])


@pytest.mark.parametrize("token", [-1, 2**32, 2**70, "a", None])
def test_undecodable_tokens_are_a_config_error(tmp_path, token):
    tokenizer, _ = load_tokenizer(write(tmp_path), 400)
    data = DataSplits(train=[], validation=[], fingerprint="", tokenizer=tokenizer)
    assert data.decode(data.encode_prompt(TEXT)) == TEXT
    with pytest.raises(ConfigError, match=r"^data\.tokenizer: cannot decode tokens: "):
        data.decode([token])
