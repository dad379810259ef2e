import io
import json
import logging
import math
import re
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console

from foundry.config.schemas.tracking import Tracking
from foundry.run_dir.log import RunLog
from foundry.tracking.console_progress import Progress, header
from foundry.tracking.humanize import count, duration
from foundry.tracking.json_progress import JsonProgress
from foundry.tracking.metrics_file import step_record
from foundry.tracking.observers import build_observers


def tell(events, *, terminal, width=100):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=width)
    observer = Progress(console=console)
    observer.on_start(events.start())
    observer.on_step(events.step(10, loss=2.5, mfu=0.412))
    observer.on_evaluation(events.evaluation(10, val_loss=2.75))
    observer.on_step(events.step(200, loss=math.nan, tokens_per_second=None))
    observer.on_end(events.end())
    return stream.getvalue()


def test_progress_without_a_terminal_is_plain_lines(events):
    text = tell(events, terminal=False, width=40)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    assert "batch          2 ranks x 4 per rank x 4 accumulated = 32 samples per step, 4.1k tokens\n" in text
    assert "step  10/200  ETA 0:00:19  loss 2.5000  lr 1.00e-03  41k tokens/s  MFU 41.2%\n" in text
    assert "step 10  held-out loss 2.7500  val_accuracy 0.2000\n" in text
    assert "step 200/200  ETA 0:00:00  loss nan  lr 1.00e-03  320 samples/s\n" in text
    assert "unigram entropy  3.2500" in text
    assert re.search(r"held-out loss +1\.7500\n", text)
    assert f"run directory    {events.run_dir}\n" in text
    assert f"mlflow ui --backend-store-uri sqlite:///{Path.cwd()}/mlflow.db" in text


def test_progress_on_a_terminal_is_a_bar(events):
    text = tell(events, terminal=True, width=140)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "200/200" in plain
    assert "loss nan  held-out 2.7500" in plain
    assert "finished" in plain
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1


def test_progress_bar_on_a_narrow_terminal_stays_on_one_line(events):
    text = tell(events, terminal=True, width=60)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    bars = [line for line in re.split(r"[\r\n]", plain) if "━" in line and "ETA" in line]
    assert bars
    assert all(len(line) <= 60 and "loss" in line for line in bars)


def test_progress_hides_credentials_of_the_tracking_uri(events):
    event = events.start()
    event.config["tracking"]["uri"] = "https://ann:hunter2@mlflow.example"
    stream = io.StringIO()
    observer = Progress(console=Console(file=stream))
    observer.on_start(event)
    observer.on_end(events.end())
    assert "hunter2" not in stream.getvalue()
    assert "https://***@mlflow.example" in stream.getvalue()


def json_lines(events, **step):
    stream = io.StringIO()
    observer = JsonProgress(stream=stream)
    observer.on_start(events.start())
    observer.on_step(events.step(10, loss=2.5, **step))
    observer.on_evaluation(events.evaluation(10, val_loss=math.inf, samples_file=events.run_dir / "plots/samples.txt"))
    observer.on_end(events.end(result={"status": "finished", "loss": math.nan}))
    assert stream.getvalue().endswith("\n")
    return [json.loads(line, parse_constant=pytest.fail) for line in stream.getvalue().splitlines()]


def test_json_progress_writes_one_object_per_event(events):
    start, step, evaluation, end = json_lines(events, grad_norm=math.nan)
    assert [line["event"] for line in (start, step, evaluation, end)] == ["start", "step", "evaluation", "end"]
    for line in (start, step, evaluation, end):
        assert line["run_dir"] == str(events.run_dir)
        assert datetime.fromisoformat(line["time"]).utcoffset() == timedelta(0)
    assert (start["step"], start["total_steps"], start["parameters"], start["metric"]) == (
        0,
        200,
        1_234_567,
        "val_loss",
    )
    assert step_record(events.step(10, loss=2.5)).keys() <= step.keys()
    assert (step["loss"], step["grad_norm"], step["accuracy"]) == (2.5, "NaN", 0.25)
    assert (step["total_steps"], step["eta_seconds"]) == (200, pytest.approx(19.0))
    assert (evaluation["val_loss"], evaluation["val_accuracy"]) == ("Infinity", 0.2)
    assert evaluation["samples_file"] == f"{events.run_dir}/plots/samples.txt"
    assert (end["state"], end["reason"], end["result"]) == ("finished", "", {"status": "finished", "loss": "NaN"})
    assert end["mlflow"].startswith("mlflow ui --backend-store-uri sqlite:///")


def test_metric_cannot_replace_a_field_of_json_progress(events):
    _, step, _, _ = json_lines(events, metrics={"event": 7.0, "time": 8.0})
    assert step["event"] == "step"
    assert datetime.fromisoformat(step["time"])


@pytest.mark.parametrize("progress", [True, False, "json"])
def test_log_of_a_run_has_its_progress_lines(events, progress, capsys):
    handler = RunLog(events.run_dir / "foundry.log")
    handler.setFormatter(logging.Formatter("[%(name)s][%(levelname)s] %(message)s"))
    logging.root.addHandler(handler)
    try:
        observers = build_observers(Tracking(progress=progress, plots=False, mlflow=False), events.run_dir)
        for observer in observers:
            observer.on_start(events.start())
            observer.on_step(events.step(10, loss=2.5))
            observer.on_evaluation(events.evaluation(10, val_loss=2.75))
            observer.on_end(events.end())
    finally:
        logging.root.removeHandler(handler)
        handler.close()
    lines = (events.run_dir / "foundry.log").read_text().splitlines()
    assert all(line.startswith("[foundry.progress][INFO] ") for line in lines)
    text = "\n".join(lines)
    assert "step  10/200  ETA 0:00:19  loss 2.5000" in text
    assert "step 10  held-out loss 2.7500" in text
    assert re.search(r"finished +after", text)
    printed = capsys.readouterr().out
    assert bool(printed) == bool(progress)
    if progress == "json":
        assert [json.loads(line)["event"] for line in printed.splitlines()] == ["start", "step", "evaluation", "end"]


def test_header_accepts_an_empty_plan(events):
    assert header(events.start(plan={}, config={})) == {"run directory": str(events.run_dir)}


def test_progress_of_a_failed_run_shows_its_reason(events):
    stream = io.StringIO()
    observer = Progress(console=Console(file=stream))
    observer.on_start(events.start(plan={}))
    observer.on_end(events.end(state="failed", reason="out of memory [on rank 3]", result={}))
    assert re.search(r"failed +out of memory \[on rank 3\]\n", stream.getvalue())
    assert re.search(rf"traceback +{re.escape(str(events.run_dir))}/foundry.log\n", stream.getvalue())


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (1234, "1.23k"), (999_999, "1M"), (1.5e9, "1.5B"), (0.25, "0.25"), (math.inf, "inf")],
)
def test_count_formats_numbers_with_suffixes(value, text):
    assert count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00:00"), (3661.4, "1:01:01"), (90000, "1d 1:00:00"), (math.nan, "-:--:--"), (-1, "-:--:--")],
)
def test_duration_formats_seconds(seconds, text):
    assert duration(seconds) == text
