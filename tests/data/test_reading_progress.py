"""Lines on how far a long reading has got, by a clock of the test's own."""

import json
import logging

import pytest

from foundry.data.conversations.chats import chat_files
from foundry.data.corpora.text import text_files
from foundry.data.io import reading_progress
from foundry.data.io.reading_progress import ReadingProgress, utf8_bytes


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == reading_progress.__name__]


@pytest.fixture(autouse=True)
def everything_is_logged(caplog):
    caplog.set_level(logging.INFO)


def test_megabytes_their_rate_and_what_is_left(caplog):
    clock = iter([0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0])  # at the beginning, and after each
    progress = ReadingProgress("tokenising", 90_000_000, clock=lambda: next(clock))
    assert list(progress.over(["a" * 15_000_000] * 6, utf8_bytes)) == ["a" * 15_000_000] * 6
    assert lines(caplog) == [
        "tokenising: 45 of 90 MB, 7.5 MB/s, 0:00:06 left",
        "tokenising: 90 of 90 MB, 7.5 MB/s, 0:00:00 left",
    ]


def test_rows_and_what_nobody_has_counted(caplog):
    clock = iter([0.0, 0.0, 6.0])
    assert len(list(ReadingProgress("reading", in_rows=True, clock=lambda: next(clock)).over(range(2)))) == 2
    assert lines(caplog) == ["reading: 2 rows, 0 rows/s"]


def test_bytes_are_those_of_utf8():
    assert [utf8_bytes(text) for text in ("abc", "ü", "文字", "")] == [3, 2, 6, 0]


def test_quick_runs_say_nothing_and_slow_ones_how_far_each_pass_is(tmp_path, caplog, monkeypatch):
    rows = [{"text": f"Document {n}: the dog runs.", "prompt": f"{n}?", "completion": str(n)} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"seed": 0, "seq_len": 64, "vocab_size": 300, "tokenizer": None, "held_out": 0.2}
    options |= {"path": str(tmp_path / "rows.jsonl")}
    text_files(**options | {"seq_len": 8}, cache_dir=str(tmp_path / "quick"))
    chat_files(**options, cache_dir=str(tmp_path / "quick"))
    assert lines(caplog) == []
    monkeypatch.setattr(reading_progress, "SECONDS_BETWEEN_LINES", 0.0)
    text_files(**options | {"seq_len": 8}, cache_dir=str(tmp_path / "slow"))
    assert {line.partition(":")[0] for line in lines(caplog)} == {"reading", "learning a tokenizer", "tokenising"}
    assert lines(caplog)[-1].startswith("tokenising: 0 of 0 MB")
    chat_files(**options, cache_dir=str(tmp_path / "slow"))
    assert lines(caplog)[-1].startswith("tokenising: 40 of 40 rows, ")
