"""Nested columns, selected with dotted names, in every file format that supports them."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from foundry.core.errors import ConfigError
from foundry.data.conversations.chats import chat_files
from foundry.data.corpora.text import text_files
from foundry.data.io.nested import names_in, path_in, value_at
from foundry.tasks.post_training.data.preferences import preference_files
from foundry.tasks.post_training.data.prompts import prompt_files

ROWS = [
    {
        "message": {"text": f"Document {n}: the dog runs.", "by": {"name": f"author {n}"}} if n % 7 else None,
        "asked": f"What is {n}?",
        "data": {"answer": str(n * n), "worse": f"{n}, perhaps", "dialogue": [{"role": "user", "content": f"{n}?"}]},
    }
    for n in range(40)
]
SETTINGS = {"seed": 0, "vocab_size": 300, "tokenizer": None, "held_out": 0.2}
KINDS = ["jsonl", "json", "parquet", "arrow"]


def write(folder, kind, rows=ROWS):
    file = folder / f"rows.{kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "json":
        file.write_text(json.dumps(rows))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=7)
    else:
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    return str(file)


def text(path, field, folder):
    found = text_files(path=path, text_field=field, seq_len=8, cache_dir=str(folder / "cache"), **SETTINGS)
    return found.train.tokens.tolist(), found.validation.tokens.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("field", ["message.text", "message.by.name"])
def test_nested_text_field_gives_the_same_samples_as_a_flat_one(tmp_path, kind, field):
    (tmp_path / "known").mkdir()
    part = field.rpartition(".")[2]
    flat = [{"text": ((row["message"] or {"by": {}}) | (row["message"] or {"by": {}})["by"]).get(part)} for row in ROWS]
    known = text(write(tmp_path / "known", "jsonl", flat), "text", tmp_path)
    assert text(write(tmp_path, kind), field, tmp_path) == known


@pytest.mark.parametrize("kind", KINDS)
def test_missing_nested_field_error_lists_the_available_names(tmp_path, kind):
    with pytest.raises(
        ConfigError,
        match=r"has no (key|column) 'message\.txt'; its (keys|columns): .*message, message\.by, message\.by\.name, m",
    ):
        text(write(tmp_path, kind, ROWS[1:]), "message.txt", tmp_path)


def test_column_name_with_dots_precedes_a_nested_path(tmp_path):
    rows = [{"a.b": f"whole name {n}", "a": {"b": f"by parts {n}"}} for n in range(20)]
    assert value_at(rows[0], "a.b") == "whole name 0"
    known = text(write(tmp_path, "jsonl", [{"a.b": row["a.b"]} for row in rows]), "a.b", tmp_path)
    assert text(write(tmp_path, "json", rows), "a.b", tmp_path) == known
    assert path_in(pa.Table.from_pylist(rows).schema, "a.b") == ("a.b",)


TREES = st.recursive(
    st.integers(), lambda inner: st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3)
).filter(lambda tree: isinstance(tree, dict))


@settings(max_examples=examples(100), deadline=None)
@given(TREES)
def test_every_listed_nested_name_resolves_to_a_value(tree):
    for name in names_in(tree):
        found = tree
        for part in name.split("."):
            found = found[part]
        assert value_at(tree, name) == found
    with pytest.raises(KeyError):
        value_at(tree, "x.y")


def rows_of(part, path, folder, columns, **options):
    settings = SETTINGS | {"seq_len": 64, "cache_dir": str(folder / "cache")} | options
    found = part(path=path, columns=columns, **settings)
    items = found.train_prompts or found.train
    return [item.tokens if found.train_prompts else item["tokens"].tolist() for item in items]


CASES = {
    "chats": (chat_files, {"prompt": "asked", "completion": "data.answer"}, {}),
    "preferences": (preference_files, {"prompt": "asked", "chosen": "data.answer", "rejected": "data.worse"}, {}),
    "prompts": (prompt_files, {"messages": "data.dialogue", "answer": "data.answer"}, {"max_new_tokens": 4}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_columns_setting_maps_renamed_and_nested_columns(tmp_path, kind, case):
    part, columns, options = CASES[case]
    (tmp_path / "known").mkdir()
    flat = [{name: value_at(row, called) for name, called in columns.items()} for row in ROWS]
    known = rows_of(part, write(tmp_path / "known", "jsonl", flat), tmp_path, {}, **options)
    assert rows_of(part, write(tmp_path, kind), tmp_path, columns, **options) == known
    with pytest.raises(ConfigError, match=r"data\.path: "):
        rows_of(part, write(tmp_path, kind), tmp_path, {}, **options)


def test_identity_depends_on_the_columns_setting(tmp_path):
    path = write(tmp_path, "jsonl")
    contents = {
        chat_files(
            path=path, columns={"prompt": "asked", "completion": name}, seq_len=64, cache_dir=str(tmp_path), **SETTINGS
        ).content
        for name in ("data.answer", "data.worse")
    }
    assert len(contents) == 2
