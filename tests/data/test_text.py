import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foundry.core.errors import ConfigError
from foundry.data.corpora.corpus import held_out_names, stdlib_corpus
from foundry.data.corpora.text import text_files
from foundry.data.corpora.token_cache import unigram_entropy
from foundry.data.corpora.token_sequences import TokenSequences
from foundry.data.corpora.tokenizer import END_OF_DOCUMENT, train_tokenizer

WORDS = ["dog", "cat", "fox", "hen"]
DOCUMENTS = [f"Document {i}: the {WORDS[i % 4]} runs over the hill.\n" for i in range(40)]


@pytest.fixture
def folder(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "texts").mkdir()
    for i, text in enumerate(DOCUMENTS):
        (tmp_path / "texts" / f"{i:02}.txt").write_text(text)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in DOCUMENTS))
    pq.write_table(pa.table({"text": DOCUMENTS, "n": [1] * len(DOCUMENTS)}), tmp_path / "rows.parquet")
    return tmp_path


def load(folder, path, **changes):
    options = {
        "seed": 0,
        "seq_len": 8,
        "vocab_size": 300,
        "tokenizer": None,
        "held_out": 0.2,
        "cache_dir": str(folder / "cache"),
    }
    return text_files(path=str(folder / path), **{**options, **changes})


def all_tokens(sequences):
    return sequences.tokens.tolist()


@settings(max_examples=30, deadline=None)
@given(length=st.integers(0, 60), seq_len=st.integers(1, 12))
def test_samples_cover_tokens_once_and_targets_are_the_next_tokens(length, seq_len):
    sequences = TokenSequences(np.arange(length, dtype=np.uint16), seq_len)
    assert len(sequences) == max(0, length - 1) // seq_len
    for index in range(len(sequences)):
        sample = sequences[index]
        assert sample["tokens"].tolist() == list(range(index * seq_len, (index + 1) * seq_len))
        assert torch.equal(sample["targets"], sample["tokens"] + 1)
        assert sample["tokens"].dtype == sample["targets"].dtype == torch.int64
    assert sequences.dropped_tokens == length - len(sequences) * seq_len


def test_token_sequences_batch_stacks_its_samples():
    sequences = TokenSequences(np.arange(50, dtype=np.uint32), 7)
    batch = sequences.batch([4, 0, 4])
    for row, index in enumerate([4, 0, 4]):
        for name, value in sequences[index].items():
            assert torch.equal(batch[name][row], value)
    with pytest.raises(IndexError):
        sequences.batch([7])


@settings(max_examples=50, deadline=None)
@given(number=st.integers(2, 200), share=st.floats(0.001, 0.999))
def test_held_out_share_is_exact_and_never_empty(number, share):
    names = [f"file{i}" for i in range(number)]
    chosen = held_out_names(names, share)
    assert len(chosen) == min(max(1, round(share * number)), number - 1)
    assert chosen == held_out_names(names[::-1], share)


@pytest.mark.parametrize("path", ["texts", "texts/*.txt", "rows.jsonl", "rows.parquet"])
def test_every_text_format_gives_the_same_documents_split_and_tokens(folder, path):
    splits, reference = load(folder, path), load(folder, "rows.jsonl")
    assert splits.notes["documents"] == 40
    assert all_tokens(splits.train) == all_tokens(reference.train)
    assert all_tokens(splits.validation) == all_tokens(reference.validation)
    texts = [splits.tokenizer.decode(list(part.tokens)) for part in (splits.train, splits.validation)]
    end = splits.tokenizer.token_to_id(END_OF_DOCUMENT)
    assert [(part.tokens == end).sum() for part in (splits.train, splits.validation)] == [32, 8]
    assert sorted("".join(texts).splitlines()) == sorted(text.strip() for text in DOCUMENTS)


def test_text_notes_report_counts_and_fingerprint_follows_settings(folder):
    splits = load(folder, "rows.jsonl")
    assert splits.tokens_per_sample == 8
    assert splits.train.tokens.dtype == np.uint16
    assert splits.notes["train_tokens"] == len(splits.train.tokens)
    assert splits.notes["dropped_train_tokens"] == len(splits.train.tokens) - 8 * len(splits.train)
    assert 0 < splits.notes["unigram_entropy"] < np.log(300)
    assert load(folder, "rows.jsonl", seed=9).fingerprint == splits.fingerprint
    assert load(folder, "rows.jsonl", seq_len=9).fingerprint != splits.fingerprint
    assert load(folder, "rows.jsonl", vocab_size=290).fingerprint != splits.fingerprint


def test_unigram_entropy_of_known_frequencies_is_exact():
    train = np.array([3, 2, 0])  # With add-one smoothing: 4/8, 3/8, 1/8.
    held_out = np.array([1, 1, 1])
    expected = -(np.log(4 / 8) + np.log(3 / 8) + np.log(1 / 8)) / 3
    assert unigram_entropy(train, held_out) == pytest.approx(expected, rel=1e-15)
    assert np.isnan(unigram_entropy(train, np.zeros(3, np.int64)))


def test_token_cache_is_reused_until_the_content_changes(folder):
    first = load(folder, "rows.jsonl")
    published = {path.name for path in (folder / "cache").iterdir() if path.is_dir() and path.name != "arrow"}
    times = [path.stat().st_mtime_ns for path in (folder / "cache").glob("*/train.npy")]
    load(folder, "rows.jsonl")
    assert [path.stat().st_mtime_ns for path in (folder / "cache").glob("*/train.npy")] == times
    assert len(published) == 1
    with (folder / "rows.jsonl").open("a") as stream:
        stream.write(json.dumps({"text": "one more", "n": 1}) + "\n")
    assert load(folder, "rows.jsonl").fingerprint != first.fingerprint


def test_tokenizer_is_trained_on_the_training_split_only(folder):
    (folder / "held").mkdir()
    (folder / "held" / "a.txt").write_text("zyxzyxzyx " * 50)
    splits = load(folder, "texts", validation_path=str(folder / "held"))
    assert not any("zyx" in entry for entry in splits.tokenizer.get_vocab())
    assert splits.tokenizer.decode(list(splits.validation.tokens)) == "zyxzyxzyx " * 50


def test_single_document_holds_out_its_end_for_validation(folder):
    text = "".join(f"line {i}\n" for i in range(200))
    (folder / "one.txt").write_text(text)
    splits = load(folder, "one.txt", held_out=0.25)
    cut = round(len(text) * 0.75)
    assert splits.tokenizer.decode(list(splits.train.tokens)) == text[:cut]
    assert splits.tokenizer.decode(list(splits.validation.tokens)) == text[cut:]


@pytest.mark.long
def test_concurrent_processes_publish_one_cache_folder(folder):
    code = (
        "from foundry.data.corpora.text import text_files\n"
        f"splits = text_files(path={str(folder / 'texts')!r}, seed=0, seq_len=8, vocab_size=300, tokenizer=None,"
        f" held_out=0.2, cache_dir={str(folder / 'cache')!r})\n"
        "import hashlib\n"
        "print(splits.fingerprint, hashlib.sha256(splits.train.tokens.tobytes()).hexdigest())\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = {process.communicate(timeout=120)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(outputs) == 1
    folders = [path for path in (folder / "cache").iterdir() if path.is_dir()]
    assert len(folders) == 1
    assert {path.name for path in folders[0].iterdir()} == {
        "tokenizer.json",
        "train.npy",
        "validation.npy",
        "statistics.json",
        "manifest.json",
    }


def test_given_tokenizer_is_used(folder):
    tokenizer = train_tokenizer(["abc abc"] * 5, 270)
    (folder / "tok").mkdir()
    tokenizer.save(str(folder / "tok" / "tokenizer.json"))
    splits = load(folder, "rows.jsonl", tokenizer=str(folder / "tok"))
    assert splits.tokenizer.to_str() == tokenizer.to_str()


def test_tokenizer_without_an_end_token_gets_one(folder):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(folder / "bytes.json"))
    splits = load(folder, "rows.jsonl", tokenizer=str(folder / "bytes.json"))
    assert splits.tokenizer.get_vocab_size() == 257
    assert (splits.train.tokens == 256).sum() == 32


def save_large_tokenizer(folder):
    train_tokenizer(DOCUMENTS, 300).save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


@pytest.mark.parametrize(
    ("path", "changes", "key", "named"),
    [
        ("absent.txt", {}, "data.path", "has no files"),
        ("cache-*.jsonl", {}, "data.path", "has no files"),
        ("rows.*", {}, "data.path", "one kind"),
        ("rows.jsonl", {"text_field": "body"}, "data.text_field", "n, text"),
        ("rows.parquet", {"text_field": "n"}, "data.text_field", "int64"),
        ("rows.jsonl", {"seq_len": 5000}, "data.seq_len", "5001"),
        ("rows.jsonl", {"validation_path": "/absent"}, "data.validation_path", "/absent"),
        ("rows.jsonl", {"tokenizer": "/absent"}, "data.tokenizer", "tokenizer.json"),
    ],
)
def test_text_config_errors_name_key_and_value(folder, path, changes, key, named):
    with pytest.raises(ConfigError) as caught:
        load(folder, path, **changes)
    (violation,) = caught.value.violations
    assert violation.key == key
    assert named in violation.message
    assert "\n" not in str(violation)


def test_vocab_size_smaller_than_the_tokenizer_is_refused_with_its_size(folder):
    with pytest.raises(ConfigError, match=r"set data\.vocab_size=300"):
        load(folder, "rows.jsonl", tokenizer=save_large_tokenizer(folder), vocab_size=290)


def test_broken_jsonl_is_a_one_line_config_error(folder):
    (folder / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(ConfigError) as caught:
        load(folder, "broken.jsonl")
    assert caught.value.violations[0].key == "data.path"
    assert "\n" not in str(caught.value)


def test_stdlib_corpus_excludes_tests_and_is_split_by_file_name():
    corpus = stdlib_corpus(held_out=0.05)
    splits = corpus.read()
    names = [path.as_posix() for split in (splits.train, splits.validation) for path in split.files]
    assert 400 < len(names) < 900
    assert len(splits.validation.files) == round(0.05 * len(names))
    assert any(name.endswith("json/decoder.py") for name in names)
    assert not any("/test/" in name or "site-packages" in name for name in names)
