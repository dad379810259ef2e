"""Prompt files, with the columns that rewards use."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foundry.config.schemas.data import ArithmeticForm, OnBadRow
from foundry.core.errors import ConfigError
from foundry.data.arithmetic import arithmetic
from foundry.tasks.post_training.data.prompts import prompt_files

ROWS = [{"prompt": f"count {number}", "answer": number, "kind": "n"} for number in range(20)]


def load(path, **changes):
    options = {"seed": 0, "seq_len": 48, "max_new_tokens": 8, "vocab_size": 257, "tokenizer": None, "held_out": 0.2}
    return prompt_files(path=str(path), cache_dir=str(path.parent / "cache"), **options | changes)


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_prompts_are_rendered_and_keep_their_columns(tmp_path):
    splits = load(write(tmp_path / "a.jsonl", ROWS))
    assert (len(splits.train), len(splits.validation)) == (len(splits.train_prompts), len(splits.prompts)) == (16, 4)
    prompt = splits.train_prompts[3]
    assert prompt.row == splits.train[3]["row"].item() == 3
    assert splits.tokenizer.decode(list(prompt.tokens)) == f"user: {prompt.columns['prompt']}\nassistant: "
    assert prompt.columns["kind"] == "n"
    assert prompt.answer == str(prompt.columns["answer"])
    assert splits.encode_prompt(prompt.columns["prompt"]) == list(prompt.tokens)
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "b.parquet")
    parquet = load(tmp_path / "b.parquet", tokenizer=None)
    assert [p.columns for p in parquet.train_prompts] == [p.columns for p in splits.train_prompts]


def test_whole_numbers_read_as_floats_become_integers(tmp_path):
    answers = [None, float("nan"), 2.5, *map(float, range(17))]  # Like a pandas column with a missing value.
    rows = {"prompt": [f"count {number}" for number in range(20)], "answer": pa.array(answers, pa.float64())}
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    splits = load(tmp_path / "a.parquet")
    found = {prompt.columns["prompt"]: prompt for prompt in [*splits.train_prompts, *splits.prompts]}
    assert [found[f"count {number}"].answer for number in (0, 1, 2, 3, 19)] == [None, None, "2.5", "0", "16"]
    assert found["count 19"].columns["answer"] == 16


def test_messages_become_prompts_up_to_their_last_answer(tmp_path):
    turns = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "user", "assistant")]
    rows = [{"messages": turns}, {"prompt": turns[:2], "other": None}, *ROWS]
    splits = load(write(tmp_path / "a.jsonl", rows), seq_len=80, validation_path=str(write(tmp_path / "v.jsonl", ROWS)))
    first, second = splits.train_prompts[:2]
    decode = splits.tokenizer.decode
    assert decode(list(first.tokens)) == "system: s\nuser: u\nassistant: auser: u\nassistant: "
    assert (first.answer, second.answer) == ("a", None)
    assert decode(list(second.tokens)) == "system: s\nuser: u\nassistant: "


def test_bad_prompt_rows_are_reported_by_file_and_line_or_skipped(tmp_path):
    bad = ["{", {"text": "x"}, {"prompt": 3}, {"prompt": " "}, {"prompt": "long " * 9}]
    path = write(tmp_path / "a.jsonl", [*bad, *ROWS])
    with pytest.raises(ConfigError) as caught:
        load(path)
    lines = [violation.message for violation in caught.value.violations]
    assert [line.partition(" ")[0] for line in lines[:5]] == [f"{path}:{number}" for number in range(1, 6)]
    assert "has neither prompt nor messages (its columns: text)" in lines[1]
    assert "has 63 tokens, more than the 40 that data.seq_len=48 leaves beside a completion of 8" in lines[4]
    assert lines[5].startswith("5 of 25 rows cannot be used")
    kept = load(path, on_bad_row=OnBadRow.skip)
    assert len(kept.train) + len(kept.validation) == len(ROWS)


def test_arithmetic_prompts_equal_the_prompts_of_the_chat_form(tmp_path):
    options = {"seed": 1, "num_rows": 50, "seq_len": 160, "vocab_size": 257, "tokenizer": None, "held_out": 0.05}
    made = {form: arithmetic(form=form, cache_dir=str(tmp_path), **options) for form in ArithmeticForm}
    prompts, chats = made[ArithmeticForm.prompts].prompts, made[ArithmeticForm.chats].prompts
    assert [(p.tokens, p.answer) for p in prompts] == [(c.tokens, c.answer) for c in chats]
    assert len(made[ArithmeticForm.prompts].train_prompts) == 50
