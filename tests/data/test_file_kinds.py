"""All file formats of texts and rows, compressed or not, give the same samples."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import csv

from foundry.config.schemas.data import OnBadRow, TrainOn
from foundry.core.errors import ConfigError
from foundry.data.conversations.chats import chat_files
from foundry.data.corpora.text import text_files
from foundry.data.io.files import TEXTS, suffix_of

TEXT = [f'Document {n}: the "dog", number 00{n},\nruns; naïve\tas ever.\n' for n in range(40)]
ROWS = {"text": TEXT, "number": list(range(40))}
CHATS = {"prompt": [f"What is {n}, squared?" for n in range(40)], "completion": [str(n * n) for n in range(40)]}
KINDS = ["jsonl", "json", "parquet", "csv", "tsv", "arrow", "file.arrow", "jsonl.gz", "jsonl.zst", "csv.gz", "json.zst"]


def content(kind, columns):
    table, stream = pa.table(columns), pa.BufferOutputStream()
    match kind.removesuffix(".gz").removesuffix(".zst"):
        case "jsonl":
            return "".join(json.dumps(row) + "\n" for row in table.to_pylist()).encode()
        case "json":
            return json.dumps(table.to_pylist(), ensure_ascii=False).encode()
        case "parquet":
            pq.write_table(table, stream, row_group_size=7)
        case "csv":
            csv.write_csv(table, stream)
        case "tsv":
            csv.write_csv(table, stream, csv.WriteOptions(delimiter="\t"))
        case "arrow":
            with pa.ipc.new_stream(stream, table.schema) as writer:
                writer.write_table(table, max_chunksize=7)
        case "file.arrow":
            with pa.ipc.new_file(stream, table.schema) as writer:
                writer.write_table(table, max_chunksize=7)
    return stream.getvalue().to_pybytes()


def write(folder, kind, columns):
    file = folder / f"rows.{kind}"
    data = content(kind, columns)
    if kind.endswith(".gz"):
        data = gzip.compress(data)
    elif kind.endswith(".zst"):
        data = pa.compress(data, codec="zstd", asbytes=True)
    file.write_bytes(data)
    return str(file)


def load(path, **changes):
    options = {"seed": 0, "seq_len": 8, "vocab_size": 300, "tokenizer": None, "held_out": 0.2}
    return text_files(path=path, **options | {"cache_dir": str(Path(path).parent / "cache")} | changes)


def tokens(splits):
    return splits.train.tokens.tolist(), splits.validation.tokens.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_format_gives_the_same_text_samples(kind, tmp_path):
    (tmp_path / "known").mkdir()
    known = load(write(tmp_path / "known", "jsonl", ROWS))
    assert tokens(load(write(tmp_path, kind, ROWS))) == tokens(known)


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_format_gives_the_same_chat_samples(kind, tmp_path):
    def samples(path):
        found = chat_files(
            seed=0,
            path=path,
            seq_len=64,
            vocab_size=300,
            tokenizer=None,
            held_out=0.2,
            cache_dir=str(tmp_path / "cache"),
            train_on=TrainOn.all,
            on_bad_row=OnBadRow.refuse,
        )
        return [found.train[index]["tokens"].tolist() for index in range(len(found.train))]

    (tmp_path / "known").mkdir()
    assert samples(write(tmp_path, kind, CHATS)) == samples(write(tmp_path / "known", "jsonl", CHATS))


@pytest.mark.parametrize("name", ["a.md", "a.txt.gz", "a.md.zst"])
def test_markdown_and_compressed_text_files_are_read_as_one_document(name, tmp_path):
    (tmp_path / "known").mkdir()
    (tmp_path / "known" / "a.txt").write_text("".join(TEXT))
    data = "".join(TEXT).encode()
    if name.endswith(".gz"):
        data = gzip.compress(data)
    elif name.endswith(".zst"):
        data = pa.compress(data, codec="zstd", asbytes=True)
    (tmp_path / name).write_bytes(data)
    assert tokens(load(str(tmp_path / name))) == tokens(load(str(tmp_path / "known" / "a.txt")))


def test_save_to_disk_folder_is_read(tmp_path):
    """The folder is like one of the datasets library: Arrow streams and JSON metadata."""
    folder = tmp_path / "saved"
    folder.mkdir()
    (tmp_path / "known").mkdir()
    for part in range(2):
        columns = {name: values[20 * part : 20 * part + 20] for name, values in ROWS.items()}
        (folder / f"data-0000{part}-of-00002.arrow").write_bytes(content("arrow", columns))
    (folder / "dataset_info.json").write_text('{"features": {}}')
    (folder / "state.json").write_text('{"_data_files": []}')
    assert tokens(load(str(folder))) == tokens(load(write(tmp_path / "known", "jsonl", ROWS)))


def test_mixed_file_formats_are_refused_and_mixed_compression_is_accepted(tmp_path):
    (tmp_path / "one").mkdir()
    write(tmp_path / "one", "jsonl", ROWS)
    write(tmp_path / "one", "json.zst", ROWS)
    assert len(load(str(tmp_path / "one")).train) > 0
    write(tmp_path / "one", "csv", ROWS)
    with pytest.raises(ConfigError, match=r"has files of \.csv, \.json, \.jsonl; choose one kind of \.txt, \.md"):
        load(str(tmp_path / "one"))
    (tmp_path / "rows.tar.gz").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"has files of \.tar; choose one kind of"):
        load(str(tmp_path / "rows.tar.gz"))


@given(st.text("ab.", max_size=5), st.sampled_from(sorted(TEXTS)), st.sampled_from(["", ".gz", ".zst"]))
def test_suffix_of_ignores_the_compression_suffix(stem, suffix, compression):
    found = suffix_of(Path(f"x{stem}{suffix}{compression}"))
    is_own = suffix in (".parquet", ".arrow") and compression  # Parquet and Arrow compress within the file.
    assert found == (compression if is_own else suffix)
