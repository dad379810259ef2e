"""The process that sends records to MLflow: killed, hanging, signaled, and reused."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from foundry.commands.sync import send_pending
from foundry.core.stop_signals import STOP_SIGNALS
from foundry.tracking.mlflow import process as processes
from foundry.tracking.mlflow.tracker import MLflowTracker


def losses(run_dir):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{Path.cwd()}/mlflow.db")
    run_id = json.loads((run_dir / "mlflow.json").read_text())["run_id"]
    status = client.get_run(run_id).info.status
    return status, [point.step for point in client.get_metric_history(run_id, "train/loss")]


def start_tracker(events, **settings):
    """Return a tracker whose run is in MLflow, and its store process."""
    tracker = MLflowTracker(run_dir=events.run_dir, **settings)
    tracker.on_start(events.start())
    tracker.on_step(events.step(1))
    deadline = time.monotonic() + 120
    while not json.loads((events.run_dir / "mlflow.json").read_text())["run_id"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return tracker, tracker._delivery._store._process


@pytest.fixture(autouse=True)
def no_process_before(monkeypatch):
    monkeypatch.setattr(processes, "_idle", {})


@pytest.mark.long
def test_killed_mlflow_process_is_restarted_without_losing_records(events, with_database, caplog):
    tracker, process = start_tracker(events, finish_seconds=120)
    process.kill()
    for step in range(2, 20):
        tracker.on_step(events.step(step))
    tracker.on_end(events.end())
    assert "MLflow cannot be reached, the run continues and will try again: ProcessEndedError" in caplog.text
    assert not (events.run_dir / "mlflow_pending.jsonl").exists()
    assert losses(events.run_dir) == ("FINISHED", list(range(1, 20)))
    assert os.getpid() in processes._idle, "for the next run of this process"


@pytest.mark.long
def test_hanging_mlflow_process_is_killed_and_its_records_are_sent_later(events, with_database, caplog):
    tracker, process = start_tracker(events, finish_seconds=1.0, tags={"api_key": "hunter2hunter2"})
    command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
    assert command.split(b"\0")[1:4] == [b"-P", b"-m", b"foundry.tracking.mlflow.process"]
    assert len(command.split(b"\0")) == 5, "nothing of the run"
    os.kill(process.pid, signal.SIGSTOP)
    for step in range(2, 20):
        tracker.on_step(events.step(step))
    tracker.on_end(events.end())
    assert process.returncode == -signal.SIGKILL
    assert not processes._idle
    assert "were not delivered and are kept in" in caplog.text
    assert send_pending(events.run_dir) > 0
    assert losses(events.run_dir) == ("FINISHED", list(range(1, 20)))


def test_mlflow_process_ignores_stop_signals_and_ends_with_its_input():
    process = processes._start()
    for number in STOP_SIGNALS:
        process.send_signal(number)
    process.stdin.write(b'{"do": "apply", "operations": []}\n')
    process.stdin.flush()
    assert json.loads(process.stdout.readline())["error"][0] == "AssertionError", "nothing was opened"
    process.stdin.close()
    assert process.wait(60) == 0
