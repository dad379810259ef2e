import errno
import json
import math
import os
from datetime import datetime

import pytest

from foundry import __version__
from foundry.run_dir import result, status
from foundry.run_dir.files import write_atomically
from foundry.tracking.status_file import StatusFile


def read(events, name="status.json"):
    return json.loads((events.run_dir / name).read_text())


def test_status_file_follows_the_run(events):
    now = [0.0]
    observer = StatusFile(run_dir=events.run_dir, clock=lambda: now[0])
    observer.on_start(events.start())
    started = read(events)
    assert {"state": "running", "reason": "", "step": 0, "config_hash": "c0ffee"}.items() <= started.items()
    assert datetime.fromisoformat(started["started"]).utcoffset().total_seconds() == 0
    now[0] = 0.5
    observer.on_step(events.step(1))
    assert read(events)["step"] == 0
    now[0] = 1.5
    observer.on_step(events.step(2))
    assert read(events)["step"] == 2
    observer.on_end(events.end(state="requeued", reason="SIGUSR1", result={}))
    ended = read(events)
    assert (ended["state"], ended["reason"], ended["step"]) == ("requeued", "SIGUSR1", 2)
    assert ended["started"] == started["started"] <= ended["updated"]
    assert ended["version"] == started["version"] == __version__
    assert not (events.run_dir / "result.json").exists()


def test_result_file_is_strict_json(events):
    observer = StatusFile(run_dir=events.run_dir)
    observer.on_start(events.start())
    observer.on_end(events.end(result={"step": 200, "loss": math.nan, "best": {"step": 5, "val_loss": 1.25}}))
    assert read(events, "result.json") == {"step": 200, "loss": "NaN", "best": {"step": 5, "val_loss": 1.25}}
    assert read(events)["step"] == 200
    assert sorted(path.name for path in events.run_dir.iterdir()) == ["result.json", "status.json"]


def test_status_of_a_resumed_run_starts_at_its_step(events):
    first = StatusFile(run_dir=events.run_dir)
    first.on_start(events.start())
    first.on_evaluation(events.evaluation(40))
    StatusFile(run_dir=events.run_dir).on_start(events.start(step=30))
    assert read(events)["step"] == 30


def test_status_file_is_replaced_atomically(events):
    observer = StatusFile(run_dir=events.run_dir, seconds_between_updates=0.0)
    observer.on_start(events.start())
    with (events.run_dir / "status.json").open() as before:
        observer.on_step(events.step(7))
        assert json.load(before)["step"] == 0
    assert read(events)["step"] == 7


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("name", ["result.json", "status.json"])
def test_unwritable_result_or_status_does_not_finish_the_run(events, monkeypatch, number, name):
    observer = StatusFile(run_dir=events.run_dir)
    observer.on_start(events.start())

    def full(path, text, **options):
        if path.name == name:
            raise OSError(number, os.strerror(number), str(path))
        write_atomically(path, text, **options)

    monkeypatch.setattr(result, "write_atomically", full)
    monkeypatch.setattr(status, "write_atomically", full)
    with pytest.raises(OSError, match=os.strerror(number)):
        observer.on_end(events.end())
    observer.on_end(events.end(state="failed", reason="OSError", result={}))
    assert read(events)["state"] == ("failed" if name == "result.json" else "running")


def test_status_file_in_a_deleted_directory_warns_once(events, caplog):
    observer = StatusFile(run_dir=events.run_dir, seconds_between_updates=0.0)
    observer.on_start(events.start())
    (events.run_dir / "status.json").unlink()
    events.run_dir.rmdir()
    observer.on_step(events.step(1))
    observer.on_step(events.step(2))
    assert len(caplog.records) == 1
    assert "logged once" in caplog.text


@pytest.mark.parametrize("content", ["", "{}", '{"step": null}', "[]"])
def test_status_file_replaces_a_broken_earlier_status(events, content):
    events.run_dir.mkdir(exist_ok=True)
    (events.run_dir / "status.json").write_text(content)
    StatusFile(run_dir=events.run_dir).on_start(events.start())
    assert read(events)["step"] == 0
