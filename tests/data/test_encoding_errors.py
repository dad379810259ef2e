"""Bytes that are not valid UTF-8: refused with their position, or replaced on request with a warning."""

import gzip
import json
import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foundry.config.schemas.data import EncodingErrors
from foundry.core.errors import ConfigError
from foundry.data.conversations.chats import chat_files
from foundry.data.corpora.text import text_files

GOOD = [f"Document {n}: the dog runs over the hill." for n in range(30)]
BAD = b"Gr\xfc\xdfe an alle, hier und dort."
REPLACED = BAD.decode(errors="replace")
KINDS = ["txt", "txt.gz", "jsonl", "json", "csv", "tsv", "parquet", "arrow", "dictionary.parquet"]


def content(kind):
    match kind.removesuffix(".gz"):
        case "txt":
            found = "\n".join(GOOD).encode() + b"\n" + BAD + b"\n"
            return gzip.compress(found) if kind.endswith("gz") else found
        case "jsonl":
            return b"".join(json.dumps({"text": row}).encode() + b"\n" for row in GOOD) + b'{"text": "' + BAD + b'"}\n'
        case "json":
            return json.dumps([{"text": row} for row in GOOD]).encode()[:-1] + b', {"text": "' + BAD + b'"}]'
        case "csv" | "tsv":
            return b"text\n" + b"".join(b'"' + row + b'"\n' for row in (*(row.encode() for row in GOOD), BAD))
    texts = pa.array([*(row.encode() for row in GOOD), BAD]).view(pa.string())
    if kind.startswith("dictionary"):
        texts = pa.DictionaryArray.from_arrays(pa.array(range(len(GOOD) + 1), pa.int32()), texts)
    table, stream = pa.table({"text": texts}), pa.BufferOutputStream()
    if kind == "arrow":
        with pa.ipc.new_stream(stream, table.schema) as writer:
            writer.write_table(table)
    else:
        pq.write_table(table, stream)
    return stream.getvalue().to_pybytes()


def load(path, **changes):
    options = {"seed": 0, "seq_len": 8, "vocab_size": 300, "tokenizer": None, "held_out": 0.2}
    return text_files(path=str(path), **options | {"cache_dir": str(path.parent / "cache")} | changes)


PLACES = {
    "txt": r"\(line 31, byte \d+ is b'\\xfc'\)",
    "txt.gz": r"\(line 31, byte \d+ is b'\\xfc'\)",
    "jsonl": "line 31 is not valid UTF-8",
    "json": "is not valid UTF-8",
    "csv": "Row #32",
    "tsv": "Row #32",
    "parquet": "rows 0 to 30 hold text that is not valid UTF-8",
    "arrow": "Invalid UTF8 sequence at string index 30",
    "dictionary.parquet": "rows 0 to 30 hold text that is not valid UTF-8",
}


@pytest.fixture
def many_cpus():
    """Give pyarrow several threads; the rest of the suite runs it with one."""
    before = pa.cpu_count()
    pa.set_cpu_count(4)
    yield
    pa.set_cpu_count(before)


@pytest.mark.usefixtures("many_cpus")
@pytest.mark.parametrize("kind", KINDS)
def test_invalid_utf8_is_refused_or_replaced_with_a_warning(kind, tmp_path, caplog):
    path = tmp_path / f"rows.{kind}"
    path.write_bytes(content(kind))
    with pytest.raises(ConfigError, match=PLACES[kind]):
        load(path)
    with caplog.at_level(logging.WARNING):
        splits = load(path, encoding_errors=EncodingErrors.replace)
    everything = "".join(splits.tokenizer.decode(part.tokens.tolist()) for part in (splits.train, splits.validation))
    assert REPLACED.split()[0] in everything
    assert all(row in everything for row in GOOD[:20])
    (line,) = [record.getMessage() for record in caplog.records if "U+FFFD" in record.getMessage()]
    assert str(path) in line
    with pytest.raises(ConfigError, match=PLACES[kind]):  # Replaced text must not be cached as strict text.
        load(path)


def test_valid_utf8_is_read_alike_with_either_encoding_errors(tmp_path, caplog):
    path = tmp_path / "rows.csv"
    path.write_text("text\n" + "".join(f'"{row} naïve 🙂\n\ufffd"\n' for row in GOOD))
    strict, lenient = (load(path, encoding_errors=errors) for errors in EncodingErrors)
    assert strict.train.tokens.tolist() == lenient.train.tokens.tolist()
    assert strict.content != lenient.content
    assert not caplog.records


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_invalid_utf8_in_chat_rows_is_refused_or_replaced(kind, tmp_path):
    columns = {"prompt": [row.encode() for row in GOOD] + [BAD], "completion": [b"yes"] * 31}
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        rows = zip(*columns.values(), strict=True)
        path.write_bytes(b"".join(b'{"prompt": "%s", "completion": "%s"}\n' % row for row in rows))
    else:
        pq.write_table(pa.table({name: pa.array(values).view(pa.string()) for name, values in columns.items()}), path)
    options = {"seed": 0, "seq_len": 64, "vocab_size": 300, "tokenizer": None, "held_out": 0.2}
    options |= {"path": str(path), "cache_dir": str(tmp_path / "cache")}
    with pytest.raises(ConfigError, match="UTF-8"):
        chat_files(**options)
    splits = chat_files(**options, encoding_errors=EncodingErrors.replace)
    assert len(splits.train) + len(splits.validation) == 31


def test_invalid_utf8_in_nested_lists_is_refused_even_with_replace(tmp_path):
    said = pa.array([[b"fine", BAD]] * 9, pa.list_(pa.binary())).cast(pa.list_(pa.binary()))
    said = pa.ListArray.from_arrays(said.offsets, said.values.view(pa.string()))
    pq.write_table(pa.table({"text": ["a"] * 9, "messages": said}), tmp_path / "rows.parquet")
    options = {"seed": 0, "seq_len": 64, "vocab_size": 300, "tokenizer": None, "held_out": 0.2}
    with pytest.raises(ConfigError, match="hold text that is not valid UTF-8"):
        chat_files(
            path=str(tmp_path / "rows.parquet"),
            cache_dir=str(tmp_path),
            encoding_errors=EncodingErrors.replace,
            **options,
        )
