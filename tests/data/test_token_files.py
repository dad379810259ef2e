"""Token files that another program has written."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foundry.config.schemas.data import TokenDtype
from foundry.core.errors import ConfigError
from foundry.data.corpora.token_files import SequencesOfFiles, token_files
from foundry.data.corpora.token_sequences import TokenSequences

TOKENS = np.arange(2000) * 7 % 300
SEQ_LEN = 16


@pytest.fixture
def load(tmp_path):
    def call(path, **changes):
        own = {"seed": 1, "seq_len": SEQ_LEN, "vocab_size": 300, "held_out": 0.1}
        own |= {"cache_dir": str(tmp_path / "cache"), "path": str(tmp_path / path)}
        if "validation_path" in changes:
            changes["validation_path"] = str(tmp_path / changes["validation_path"])
        return token_files(**own | changes)

    return call


def with_header(tokens):
    head = np.zeros(256, np.int32)
    head[:3] = 20240520, 1, len(tokens)
    return head.tobytes() + tokens.astype(np.uint16).tobytes()


def samples(dataset):
    return dataset.batch(range(len(dataset)))["tokens"].flatten().tolist()


@pytest.mark.parametrize("kind", ["uint16", "uint32", "int32", "int64", "llm.c", "npy", "npy of int32"])
def test_every_token_file_format_gives_the_same_samples(kind, tmp_path, load):
    changes = {}
    if kind == "llm.c":
        (tmp_path / "a.bin").write_bytes(with_header(TOKENS))
    elif kind.startswith("npy"):
        np.save(tmp_path / "a.npy", TOKENS.astype(np.int32 if "32" in kind else np.uint16))
    else:
        TOKENS.astype(kind).tofile(tmp_path / "a.bin")
        changes["dtype"] = TokenDtype[kind]
    data = load("a.npy" if kind.startswith("npy") else "a.bin", **changes)
    train, validation = TokenSequences(TOKENS[:1800], SEQ_LEN), TokenSequences(TOKENS[1800:], SEQ_LEN)
    for found, expected in ((data.train, train), (data.validation, validation)):
        assert len(found) == len(expected)
        for name, value in expected.batch(range(len(expected))).items():
            assert torch.equal(found.batch(range(len(expected)))[name], value)
    assert data.tokens_per_sample == SEQ_LEN
    assert data.notes["train_tokens"] == 1800
    assert data.notes["dropped_train_tokens"] == train.dropped_tokens


def test_validation_path_is_read_and_samples_do_not_cross_files(tmp_path, load):
    (tmp_path / "parts").mkdir()
    for part, (start, stop) in enumerate([(0, 500), (500, 507), (507, 1500)]):
        TOKENS[start:stop].astype(np.uint16).tofile(tmp_path / "parts" / f"{part}.bin")
    np.save(tmp_path / "val.npy", TOKENS[1500:])
    data = load("parts", validation_path="val.npy")
    expected = [TOKENS[:496], TOKENS[507:1499]]  # 499 tokens with a successor give 496, 6 give none, 992 give all.
    assert samples(data.train) == np.concatenate(expected).tolist()
    assert len(data.train) == 31 + 0 + 62
    assert len(data.validation) == 31
    assert load("parts", validation_path="val.npy").fingerprint == data.fingerprint
    assert len(pickle.dumps(data.train)) < 3000
    assert samples(pickle.loads(pickle.dumps(data.train))) == samples(data.train)


def test_token_files_are_scanned_once(tmp_path, load):
    TOKENS.astype(np.uint16).tofile(tmp_path / "a.bin")
    load("a.bin")
    kept = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("facts.json")}
    assert len(kept) == 1
    load("a.bin", seq_len=8)
    assert kept == {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("facts.json")}


@pytest.mark.parametrize(
    ("name", "content", "changes", "message"),
    [
        ("a.bin", TOKENS.astype(np.uint16).tobytes(), {"vocab_size": 299}, "token 299; set it to 300"),
        (
            "a.bin",
            TOKENS.astype(np.uint16).tobytes(),
            {"dtype": TokenDtype.uint32},
            "check that data.dtype matches the file",
        ),
        (
            "a.bin",
            (TOKENS - 1).astype(np.int32).tobytes(),
            {"dtype": TokenDtype.int32},
            "has the token -1; check that",
        ),
        ("a.bin", b"", {}, "data.path: .*a.bin has 0 bytes, which is not a positive multiple of the size of uint16"),
        ("a.bin", b"abc", {}, "data.path: .*a.bin has 3 bytes, which is not a positive multiple of the size of uint16"),
        (
            "a.bin",
            with_header(TOKENS)[:-4],
            {},
            "data.path: .*a.bin has a header with 2000 tokens, but a size that does not match",
        ),
        ("a.npy", b"no", {}, "data.path: .*a.npy is not a NumPy array"),
        ("a.npy", b"", {}, "data.path: .*a.npy is not a NumPy array"),
        ("a.bin", TOKENS[:16].astype(np.uint16).tobytes(), {}, "data.seq_len: is 16 but no file has more"),
        (
            "a.bin",
            TOKENS[:100].astype(np.uint16).tobytes(),
            {},
            "more validation tokens than that; the longest has 10; lower it",
        ),
        ("a.txt", b"x", {}, "data.path: .*has files of .txt; choose one kind of .bin, .npy"),
    ],
)
def test_bad_token_file_error_names_the_problem(name, content, changes, message, tmp_path, load):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load(name, **changes)


@pytest.mark.parametrize("array", [np.zeros((4, 4), np.uint16), np.zeros(99), np.array([{}], dtype=object)])
def test_npy_file_with_another_shape_or_dtype_is_refused(array, tmp_path, load):
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(ConfigError, match=r"data.path: .*a.npy is (not a NumPy array|an array of)"):
        load("a.npy")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(1, 6), st.data())
def test_batch_of_several_files_equals_its_samples(lengths, seq_len, data):
    parts = [TokenSequences(100 * place + np.arange(length), seq_len) for place, length in enumerate(lengths)]
    joined = SequencesOfFiles(parts)
    every = [part[index] for part in parts for index in range(len(part))]
    assert len(joined) == len(every)
    indices = data.draw(st.lists(st.integers(0, len(every) - 1), max_size=9)) if every else []
    batch = joined.batch(indices)
    assert batch["tokens"].shape == (len(indices), seq_len)
    for row, index in enumerate(indices):
        for name, value in every[index].items():
            assert torch.equal(batch[name][row], value)
            assert torch.equal(joined[index][name], value)
    with pytest.raises(IndexError):
        joined.batch([len(every)])


def write_megatron(prefix, sequences, dtype, code=None, documents=None):
    """Write a file pair like IndexedDatasetBuilder of Megatron-LM."""
    arrays = [np.asarray(sequence, dtype) for sequence in sequences]
    prefix.with_suffix(".bin").write_bytes(b"".join(array.tobytes() for array in arrays))
    codes = {np.uint8: 1, np.int8: 2, np.int16: 3, np.int32: 4, np.int64: 5, np.uint16: 8}
    lengths = np.array([len(array) for array in arrays], np.int32)
    begins = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64)]) * np.dtype(dtype).itemsize
    with prefix.with_suffix(".idx").open("wb") as stream:
        stream.write(b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes([codes[dtype] if code is None else code]))
        stream.write(len(arrays).to_bytes(8, "little") + (len(arrays) + 1).to_bytes(8, "little"))
        stream.write(lengths.tobytes() + begins.astype(np.int64).tobytes())
        stream.write(np.arange(len(arrays) + 1, dtype=np.int64).tobytes())
    return prefix.with_suffix(".bin")


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_megatron_index_provides_the_token_dtype(tmp_path, load, dtype):
    path = write_megatron(tmp_path / "corpus_text_document", [range(500), range(500, 520), [], range(520, 900)], dtype)
    splits = load(path.name, seq_len=8, vocab_size=1000)
    assert [token for n in range(len(splits.train)) for token in splits.train[n]["tokens"].tolist()] == list(
        range(8 * len(splits.train))
    )
    assert splits.notes["train_tokens"] + splits.notes["validation_tokens"] == 900


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda bin, idx: bin.write_bytes(bin.read_bytes()[:-2]), "bytes, but corpus.idx lists 900 tokens of uint16"),
        (lambda bin, idx: idx.write_bytes(b"TNTIDX\0\0" + idx.read_bytes()[8:]), "which is not a Megatron-LM index"),
        (lambda bin, idx: idx.write_bytes(idx.read_bytes()[:40]), "which is too short for its 2 sequences"),
        (lambda bin, idx: idx.write_bytes(b""), "which is not a Megatron-LM index"),
        (
            lambda bin, idx: write_megatron(bin.with_suffix(""), [range(9)], np.uint16, code=7),
            "not a Megatron-LM index",
        ),
    ],
)
def test_megatron_index_that_does_not_match_its_data_is_refused(tmp_path, load, change, named):
    path = write_megatron(tmp_path / "corpus", [range(500), range(500, 900)], np.uint16)
    change(path, path.with_suffix(".idx"))
    with pytest.raises(ConfigError, match=named):
        load(path.name, seq_len=8, vocab_size=1000)
