"""Progress messages of long reads, with a fake clock."""

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


def test_progress_reports_megabytes_rate_and_remaining_time(caplog):
    clock = iter([0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0])  # One time at the start, and one after each item.
    progress = ReadingProgress("tokenizing", 90_000_000, clock=lambda: next(clock))
    assert list(progress.over(["a" * 15_000_000] * 6, utf8_bytes)) == ["a" * 15_000_000] * 6
    assert lines(caplog) == [
        "tokenizing: 45 of 90 MB, 7.5 MB/s, 0:00:06 left",
        "tokenizing: 90 of 90 MB, 7.5 MB/s, 0:00:00 left",
    ]


def test_progress_without_a_total_reports_rows_and_rate(caplog):
    clock = iter([0.0, 0.0, 6.0])
    assert len(list(ReadingProgress("reading", in_rows=True, clock=lambda: next(clock)).over(range(2)))) == 2
    assert lines(caplog) == ["reading: 2 rows, 0 rows/s"]


def test_utf8_bytes_counts_encoded_bytes():
    assert [utf8_bytes(text) for text in ("abc", "ü", "文字", "")] == [3, 2, 6, 0]


def test_progress_is_logged_for_slow_reads_only(tmp_path, caplog, monkeypatch):
    rows = [{"text": f"Document {n}: the dog runs.", "prompt": f"{n}?", "completion": str(n)} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"seed": 0, "seq_len": 64, "vocab_size": 300, "tokenizer": None, "held_out": 0.2}
    options |= {"path": str(tmp_path / "rows.jsonl")}
    text_files(**options | {"seq_len": 8}, cache_dir=str(tmp_path / "quick"))
    chat_files(**options, cache_dir=str(tmp_path / "quick"))
    assert lines(caplog) == []
    monkeypatch.setattr(reading_progress, "SECONDS_BETWEEN_LINES", 0.0)
    text_files(**options | {"seq_len": 8}, cache_dir=str(tmp_path / "slow"))
    assert {line.partition(":")[0] for line in lines(caplog)} == {"reading", "training a tokenizer", "tokenizing"}
    assert lines(caplog)[-1].startswith("tokenizing: 0 of 0 MB")
    chat_files(**options, cache_dir=str(tmp_path / "slow"))
    assert lines(caplog)[-1].startswith("tokenizing: 40 of 40 rows, ")
