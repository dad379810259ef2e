"""Unreadable data files give a one-line error with the file, the row if known, and the config key."""

import json
import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import csv

from foundry.core.errors import ConfigError
from foundry.data.conversations.chats import chat_files
from foundry.data.corpora.text import text_files
from foundry.data.io.files import suffix_of
from foundry.tasks.post_training.data.prompts import prompt_files

ROWS = [f"Document {number}: the dog runs over the hill.\n" for number in range(30)]


def load(path, read=text_files, **changes):
    options = {"seed": 0, "seq_len": 8, "vocab_size": 300, "tokenizer": None, "held_out": 0.2}
    options["cache_dir"] = str(Path(str(path).partition("*")[0] + "cache"))
    options |= {"max_new_tokens": 2} if read is prompt_files else {}
    return read(path=str(path), **options | changes)


def refusal(path, **changes):
    with pytest.raises(ConfigError) as refused:
        load(path, **changes)
    (violation,) = refused.value.violations
    assert "\n" not in str(violation)
    return violation


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(path, content):
    inner = Path(path.stem if path.suffix in (".gz", ".zst") else path.name).suffix
    if isinstance(content, pa.Table):
        stream = pa.BufferOutputStream()
        if inner == ".parquet":
            pq.write_table(content, stream)
        elif inner == ".csv":
            csv.write_csv(content, stream)
        else:
            with pa.ipc.new_stream(stream, content.schema) as writer:
                writer.write_table(content, max_chunksize=7)
        content = stream.getvalue().to_pybytes()
    content = content if isinstance(content, bytes) else content.encode()
    if path.suffix in (".gz", ".zst"):
        content = pa.compress(content, codec="gzip" if path.suffix == ".gz" else "zstd", asbytes=True)
    path.write_bytes(content)
    return path


GOOD = [{"text": row} for row in ROWS]
BROKEN = {
    "empty.txt": ("", "data.path", "empty"),
    "empty.jsonl": ("", "data.path", "no rows"),
    "empty.json": ("[]", "data.path", "no rows"),
    "blank.jsonl": ("\n \n\n", "data.path", "no rows"),
    "rows.parquet": (pa.table({"text": pa.array([], pa.string())}), "data.path", "no rows"),
    "all_empty.jsonl": (lines([{"text": ""}, {"text": None}]), "data.path", "2 documents, all empty"),
    "nulls.parquet": (pa.table({"text": pa.array([None, ""], pa.string())}), "data.path", "2 documents, all empty"),
    "latin.txt": ("grüße".encode("latin-1") * 50, "data.path", "UTF-8"),
    "latin.jsonl": (lines(GOOD).encode() + b'{"text": "gr\xfc\xdfe"}\n', "data.path", "line 31 is not valid UTF-8"),
    "half.jsonl": (lines(GOOD) + '{"text": "ab', "data.path", "line 31 is not JSON"),
    "key.jsonl": (lines([*GOOD, {"body": "x"}]), "data.text_field", "line 31, has no key 'text'; its keys: body"),
    "number.jsonl": (lines([*GOOD, {"text": 3}]), "data.text_field", "line 31, holds int, not text"),
    "list.jsonl": (lines([*GOOD, ["x"]]), "data.text_field", "line 31, holds list"),
    "half_pair.jsonl": (lines(GOOD) + '{"text": "\\ud800"}\n', "data.text_field", "line 31, holds an unpaired"),
    "deep.jsonl": (lines(GOOD) + "[" * 100_000 + "\n", "data.path", "cannot be read"),
    "object.json": ('{"text": "a"', "data.path", "line 1 is not JSON"),
    "half.json": ('[{"text": "a"}, ', "data.path", "cannot be read"),
    "item.json": ('[{"text": "a"}, {"b": 1}]', "data.text_field", "item 2"),
    "no.parquet": (b"", "data.path", "cannot be read"),
    "text.parquet": (b"not parquet" * 9, "data.path", "cannot be read"),
    "column.parquet": (pa.table({"body": ROWS}), "data.text_field", "body"),
    "numbers.parquet": (pa.table({"text": [1, 2]}), "data.text_field", "int64, not text"),
    "lists.parquet": (pa.table({"text": [["a"], ["b"]]}), "data.text_field", "not text"),
    "bytes.parquet": (pa.table({"text": [b"a", b"b"]}), "data.text_field", "not text"),
    "rows.arrow": (pa.table({"text": pa.array([], pa.string())}), "data.path", "no rows"),
    "column.arrow": (pa.table({"body": ROWS}), "data.text_field", "body"),
    "lists.arrow": (pa.table({"text": [["a"], ["b"]]}), "data.text_field", "not text"),
    "no.arrow": (b"", "data.path", "cannot be read"),
    "text.arrow": (b"not arrow" * 9, "data.path", "cannot be read"),
    "no.csv": (b"", "data.path", "cannot be read"),
    "head.csv": (b"text\n", "data.path", "no rows"),
    "column.csv": (pa.table({"body": ROWS}), "data.text_field", "body"),
    "ragged.csv": (b"text,other\na,b\nc\n", "data.path", "cannot be read"),
    "latin.csv": (b"text\n" + b"gr\xfc\xdfe\n" * 9, "data.path", "invalid UTF8"),
    "half.jsonl.gz": (lines(GOOD) + '{"text": "ab', "data.path", "line 31 is not JSON"),
    "latin.txt.zst": ("grüße".encode("latin-1") * 50, "data.path", "UTF-8"),
    "latin.parquet": (
        pa.table({"text": pa.array([b"gr\xfc\xdfe"] * 9, pa.binary()).view(pa.string())}),
        "data.path",
        "rows 0 to 8 hold text that is not valid UTF-8",
    ),
}
BROKEN |= {
    f"{what}.{name}": (content, "data.path", "cannot be read")
    for name in ("txt.gz", "txt.zst", "jsonl.gz", "csv.zst")
    for what, content in (("plain", "".join(ROWS).encode()), ("cut", None))
}
BROKEN["wide.txt"] = (("text " * 50).encode("utf-16"), "data.path", "UTF-8")


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("validation", [False, True], ids=["training", "validation"])
def test_broken_file_error_names_file_place_and_config_key(tmp_path, name, validation):
    content, key, named = BROKEN[name]
    broken = tmp_path / name
    if name.startswith(("plain", "cut")):
        whole = write(tmp_path / f"whole{name[3:]}", lines(GOOD)).read_bytes()
        broken.write_bytes(whole[: len(whole) // 2] if content is None else content)
    else:
        write(broken, content)
    if validation:
        good = write(tmp_path / "good.txt", "".join(ROWS))
        violation = refusal(good, validation_path=str(broken))
        key = key.replace("data.path", "data.validation_path")
    else:
        violation = refusal(broken)
    assert violation.key == key
    assert named in violation.message
    assert str(broken) in violation.message
    assert not list(tmp_path.glob("**/*.npy"))


@pytest.mark.parametrize("read", [text_files, chat_files, prompt_files], ids=lambda read: read.__name__)
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet", ".arrow", ".csv.gz"])
def test_duplicate_column_is_refused_by_name(tmp_path, suffix, read):
    name = {text_files: "text", chat_files: "completion", prompt_files: "prompt"}[read]
    table = pa.Table.from_arrays([pa.array(ROWS)] * 3, names=[name, "other", name])
    path = tmp_path / f"rows{suffix}"
    if "sv" in suffix:
        write(path, (f"{name},other,{name}\n" + "a,b,c\n" * 30).replace(",", "\t" if suffix == ".tsv" else ","))
    else:
        write(path, table)
    violation = refusal(path, read=read)
    assert violation.key == "data.path"
    assert f"it has 2 columns {name!r}" in violation.message


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".arrow"])
def test_duplicate_of_an_unused_column_is_accepted(tmp_path, suffix):
    table = pa.Table.from_arrays([pa.array(ROWS)] * 3, names=["text", "other", "other"])
    content = "text,other,other\n" + "the dog runs over the hill,b,c\n" * 30 if suffix == ".csv" else table
    assert len(load(write(tmp_path / f"rows{suffix}", content)).train) > 0


def test_error_names_the_one_broken_file_of_a_folder(tmp_path):
    for number in range(5):
        write(tmp_path / f"{number}.parquet", pa.table({"text": ROWS}))
    content = (tmp_path / "3.parquet").read_bytes()
    write(tmp_path / "3.parquet", content[: len(content) // 2])
    violation = refusal(tmp_path)
    assert violation.key == "data.path"
    assert "3.parquet cannot be read" in violation.message


@pytest.mark.parametrize("kind", ["link to nothing", "pipe"])
def test_dangling_symlink_or_pipe_in_a_folder_is_refused(tmp_path, kind):
    write(tmp_path / "good.txt", "".join(ROWS))
    strange = tmp_path / "strange.txt"
    strange.symlink_to("nowhere") if kind == "link to nothing" else os.mkfifo(strange)
    violation = refusal(tmp_path)
    assert (violation.key, "strange.txt" in violation.message) == ("data.path", True)


@pytest.mark.parametrize("pattern", ["", "none", "none/*.txt", "*.none", "**x/*", "a\0b", "[", "folder.txt"])
def test_pattern_without_matching_files_is_a_config_error(tmp_path, monkeypatch, pattern):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.txt").mkdir()
    assert refusal(pattern, cache_dir="cache").key == "data.path"


def test_folder_with_a_text_suffix_is_not_read_as_a_document(tmp_path):
    (tmp_path / "texts" / "old.txt").mkdir(parents=True)
    write(tmp_path / "texts" / "all.jsonl", lines(GOOD)).rename(tmp_path / "texts" / "old.txt" / "all.txt")
    assert len(load(tmp_path / "texts").train) > 0


@pytest.mark.parametrize(
    "name",
    ["rows.jsonl", "rows.parquet", "rows.json", "rows.txt", "rows.arrow", "rows.csv", "rows.jsonl.gz", "rows.txt.zst"],
)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_corruption_is_harmless_or_a_one_line_config_error(name, data):
    with TemporaryDirectory() as folder:
        table = pa.table({"text": ROWS})
        contents = {".jsonl": lines(GOOD), ".json": json.dumps(GOOD), ".txt": "".join(ROWS)}
        path = write(Path(folder, name), contents.get(suffix_of(Path(name)), table))
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            start = data.draw(st.integers(0, len(content)))
            content[start : start + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=40))
        path.write_bytes(content)
        try:
            load(path, cache_dir=str(Path(folder, "cache")))
        except ConfigError as error:
            (violation,) = error.violations
            assert "\n" not in str(violation)
            assert violation.key in ("data.path", "data.text_field", "data.seq_len", "data.held_out")


@pytest.mark.parametrize(
    ("seq_len", "held_out", "key", "named"),
    [
        (8, 1e-9, "data.held_out", "leaves"),
        (10**6, 0.2, "data.seq_len", "set data.seq_len="),
        (200, 0.2, "data.seq_len", "the validation text has"),
        (200, 0.7, "data.seq_len", "the training text has"),
    ],
)
def test_too_short_split_is_refused_with_the_largest_seq_len_that_fits(tmp_path, seq_len, held_out, key, named):
    path = write(tmp_path / "all.txt", "".join(ROWS))
    violation = refusal(path, seq_len=seq_len, held_out=held_out)
    assert violation.key == key
    assert named in violation.message
    if found := re.search(r"set data\.seq_len=(\d+) or less", violation.message):
        assert load(path, seq_len=int(found[1]), held_out=held_out).tokens_per_sample == int(found[1])
        assert refusal(path, seq_len=int(found[1]) + 1, held_out=held_out).key == "data.seq_len"
