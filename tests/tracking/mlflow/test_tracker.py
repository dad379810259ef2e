import json
import math
import os
import socket
import time
from dataclasses import replace

import pytest

from foundry.commands.sync import run as sync
from foundry.commands.sync import send_pending
from foundry.config.schemas.tracking import Tracking
from foundry.tracking.mlflow.destination import DEFAULT_EXPERIMENT, short_waits, tracking_uri
from foundry.tracking.mlflow.tracker import MLflowTracker

SECRET = "hunter2hunter2"


def client_of(uri):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def run_of(run_dir, uri):
    run_id = json.loads((run_dir / "mlflow.json").read_text())["run_id"]
    return client_of(uri).get_run(run_id)


def artifacts(run_dir, uri, folder=None):
    client, run_id = client_of(uri), run_of(run_dir, uri).info.run_id
    return sorted(file.path for file in client.list_artifacts(run_id, folder))


def follow(tracker, events, steps=25, **end):
    tracker.on_start(events.start())
    for step in range(1, steps + 1):
        tracker.on_step(events.step(step))
    tracker.on_evaluation(events.evaluation(steps))
    tracker.on_end(events.end(**end))


def secret_start(events):
    event = events.start()
    event.config["data"] = {
        "hf_token": SECRET,
        "source": f"https://ann:{SECRET}@host/x",
        "eos_token": "<eos>",
        "note": "x" * 7000,
        **{f"field{index}": index for index in range(150)},
    }
    return event


@pytest.mark.long
def test_mlflow_run_is_in_the_database_of_the_current_directory(events, with_database, capfd, caplog):
    (events.run_dir / "plots").mkdir(parents=True)
    for name in ("plots/loss.png", "plots/samples.txt", "plan.json", "result.json", "status.json"):
        (events.run_dir / name).write_text(name)
    tracker = MLflowTracker(run_dir=events.run_dir, tags={"sweep": "7", "api_key": SECRET}, finish_seconds=120)
    tracker.on_start(secret_start(events))
    for step in range(1, 1201):
        tracker.on_step(events.step(step, grad_norm=math.nan if step == 7 else 0.5))
    tracker.on_evaluation(events.evaluation(1200))
    tracker.on_end(events.end())

    uri = f"sqlite:///{with_database}/mlflow.db"
    run = run_of(events.run_dir, uri)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert run.info.artifact_uri.startswith(f"file://{with_database}/mlruns/foundry/")
    assert run.data.params["hparams.lr"] == "0.001"
    assert run.data.params["plan.parameters"] == "1234567"
    assert run.data.params["data.field149"] == "149"
    assert run.data.params["data.eos_token"] == "<eos>"
    assert run.data.params["data.hf_token"] == "***"
    assert run.data.params["data.source"] == "https://***@host/x"
    assert len(run.data.params["data.note"]) == 6000
    assert run.data.params["data.note"].endswith("… [truncated]")
    tags = run.data.tags
    assert {"config_hash": "c0ffee", "sweep": "7", "api_key": "***", "state": "finished"}.items() <= tags.items()
    assert {"foundry_version", "host", "run_dir"} < set(tags)
    history = client_of(uri).get_metric_history(run.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history[:2]] == [(1, 4.0), (2, pytest.approx(4.0 / 2**0.2))]
    assert len(history) == 1200
    norms = client_of(uri).get_metric_history(run.info.run_id, "train/grad_norm")
    assert [point.step for point in norms if math.isnan(point.value)] == [7]
    assert (run.data.metrics["val/loss"], run.data.metrics["val/accuracy"]) == (3.5, 0.2)
    assert artifacts(events.run_dir, uri) == ["config.yaml", "plan.json", "plots", "result.json"]
    assert artifacts(events.run_dir, uri, "plots") == ["plots/loss.png", "plots/samples.txt"]

    assert not (events.run_dir / "mlflow_pending.jsonl").exists()
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.name.startswith("foundry")]
    kept = [path for path in with_database.rglob("*") if path.is_file()]
    assert not [path for path in kept if SECRET.encode() in path.read_bytes()]
    assert "MLFLOW_HTTP_REQUEST_TIMEOUT" not in os.environ


def test_mlflow_run_has_dataset_tags_and_note(events, with_database):
    data = {"name": "corpus", "digest": "d1ce" * 8, "source": "data/corpus"}
    start = replace(events.start(), data=data)
    start.plan["notes"] = {"train_tokens": 7, "skipped_rows": {}}
    tracker = MLflowTracker(run_dir=events.run_dir, tags={"team": "arms", "try": 3}, note="*why*", finish_seconds=120)
    for _ in range(2):  # a resumed run logs the same again
        tracker.on_start(start)
        tracker.on_end(events.end())
    run = run_of(events.run_dir, f"sqlite:///{with_database}/mlflow.db")
    assert {"team": "arms", "try": "3", "mlflow.note.content": "*why*"}.items() <= run.data.tags.items()
    (dataset_input,) = run.inputs.dataset_inputs
    assert (dataset_input.dataset.name, dataset_input.dataset.digest) == ("corpus", "d1ce" * 8)
    assert json.loads(dataset_input.dataset.source) == {"uri": "data/corpus"}
    assert json.loads(dataset_input.dataset.profile) == {"train_tokens": 7}
    assert [(tag.key, tag.value) for tag in dataset_input.tags] == [("mlflow.data.context", "training")]


def test_resumed_run_continues_its_mlflow_run(events, with_database):
    follow(MLflowTracker(run_dir=events.run_dir, finish_seconds=120), events, 3, state="requeued", reason="SIGUSR1")
    uri = tracking_uri()
    first = run_of(events.run_dir, uri)
    assert (first.info.status, first.data.tags["state"]) == ("KILLED", "requeued")
    tracker = MLflowTracker(run_dir=events.run_dir, finish_seconds=120)
    event = events.start()
    event.config["hparams"]["global_batch_size"] = 64
    tracker.on_start(event)
    tracker.on_step(events.step(4))
    tracker.on_end(events.end())
    second = run_of(events.run_dir, uri)
    assert second.info.run_id == first.info.run_id
    assert second.info.status == "FINISHED"
    assert second.data.params["hparams.global_batch_size"] == "32"
    assert second.data.tags["changed.hparams.global_batch_size"] == "64"
    history = client_of(uri).get_metric_history(first.info.run_id, "train/loss")
    assert [point.step for point in history] == [1, 2, 3, 4]


def begun_with_flat_names(folder):
    """Rewrite mlflow.json of a run or sweep as written before metric groups existed."""
    path = folder / "mlflow.json"
    content = json.loads(path.read_text())
    assert content.pop("metric_names") == "grouped"
    path.write_text(json.dumps(content))


def test_mlflow_metrics_are_in_groups(events, with_database):
    tracker = MLflowTracker(run_dir=events.run_dir, finish_seconds=120)
    tracker.on_start(events.start())
    tracker.on_step(events.step(1, tflops=1.5, mfu=0.5, metrics={"accuracy": 0.25, "grad_norm/model.layers.0": 2.0}))
    tracker.on_evaluation(events.evaluation(1))
    tracker.on_end(events.end(result={"step": 1, "best": {"step": 1, "val_loss": 3.5}}))
    names = set(run_of(events.run_dir, tracking_uri()).data.metrics)
    train = ("accuracy", "epoch", "global_batch_size", "grad_norm", "loss", "lr", "samples", "tokens", "weight_decay")
    perf = ("mfu", "peak_memory_bytes", "step_seconds", "tflops", "tokens_per_second")
    expected = {*(f"train/{name}" for name in train), *(f"perf/{name}" for name in perf)}
    assert names == expected | {"val/loss", "val/accuracy", "val/best_loss", "grad_norm/model.layers.0"}


def test_resumed_run_with_flat_metric_names_keeps_them(events, with_database):
    follow(MLflowTracker(run_dir=events.run_dir, finish_seconds=120), events, 1, state="requeued", reason="SIGUSR1")
    begun_with_flat_names(events.run_dir)
    follow(MLflowTracker(run_dir=events.run_dir, finish_seconds=120), events, 3)
    run = run_of(events.run_dir, tracking_uri())
    assert {"loss", "val_loss", "lr", "tokens_per_second"} <= set(run.data.metrics)
    history = client_of(tracking_uri()).get_metric_history(run.info.run_id, "train/loss")
    assert [point.step for point in history] == [1]  # only from the first start


def test_pending_records_decide_the_metric_names_of_a_new_run(events, black_hole, with_database):
    follow(MLflowTracker(run_dir=events.run_dir, uri=black_hole, finish_seconds=0.1), events, 1, state="requeued")
    begun_with_flat_names(events.run_dir)
    tracker = MLflowTracker(run_dir=events.run_dir, uri=f"sqlite:///{with_database}/other.db", finish_seconds=0.1)
    tracker.on_start(events.start())
    tracker.on_end(events.end())
    assert json.loads((events.run_dir / "mlflow.json").read_text())["metric_names"] == "flat"


@pytest.mark.long
def test_mlflow_environment_variables_choose_experiment_and_run(events, with_database, monkeypatch):
    uri = tracking_uri()
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "of the environment")
    follow(MLflowTracker(run_dir=with_database / "a", finish_seconds=120), events, 1)
    parent = run_of(with_database / "a", uri)
    client = client_of(uri)
    assert client.get_experiment(parent.info.experiment_id).name == "of the environment"
    follow(MLflowTracker(run_dir=with_database / "b", experiment_name="chosen", finish_seconds=120), events, 1)
    assert client.get_experiment(run_of(with_database / "b", uri).info.experiment_id).name == "chosen"

    empty = client.create_run(parent.info.experiment_id).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", empty)
    follow(MLflowTracker(run_dir=with_database / "c", finish_seconds=120), events, 1)
    assert run_of(with_database / "c", uri).info.run_id == empty
    follow(MLflowTracker(run_dir=with_database / "d", finish_seconds=120), events, 1)
    child = run_of(with_database / "d", uri)
    assert child.info.run_id != empty
    assert child.data.tags["mlflow.parentRunId"] == empty


def test_mlflow_run_on_a_real_server_has_metrics_and_artifacts(events, mlflow_server):
    (events.run_dir / "plots").mkdir(parents=True)
    (events.run_dir / "plots/loss.png").write_bytes(b"\x89PNG picture")
    tracker = MLflowTracker(run_dir=events.run_dir, uri=mlflow_server.uri, run_name="over http", finish_seconds=120)
    tracker.on_start(secret_start(events))
    for step in range(1, 31):
        tracker.on_step(events.step(step, grad_norm=math.nan if step == 7 else math.inf))
    tracker.on_evaluation(events.evaluation(30))
    tracker.on_end(events.end(state="failed", reason="out of memory", result={}))
    run = run_of(events.run_dir, mlflow_server.uri)
    assert (run.info.run_name, run.info.status, run.data.tags["reason"]) == ("over http", "FAILED", "out of memory")
    assert (run.data.params["hparams.lr"], run.data.metrics["val/loss"]) == ("0.001", 3.5)
    assert len(client_of(mlflow_server.uri).get_metric_history(run.info.run_id, "train/loss")) == 30
    assert artifacts(events.run_dir, mlflow_server.uri) == ["config.yaml", "plots"]
    assert artifacts(events.run_dir, mlflow_server.uri, "plots") == ["plots/loss.png"]


@pytest.mark.long
def test_mlflow_server_outage_loses_no_records(events, own_server, caplog):
    tracker = MLflowTracker(run_dir=events.run_dir, uri=own_server.uri, finish_seconds=30)
    tracker.on_start(events.start())
    tracker.on_step(events.step(1))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not json.loads((events.run_dir / "mlflow.json").read_text())["run_id"]:
        time.sleep(0.1)
    own_server.stop()
    for step in range(2, 50):
        tracker.on_step(events.step(step))
    tracker.on_end(events.end())
    pending = events.run_dir / "mlflow_pending.jsonl"
    assert pending.exists()
    (message,) = [record.getMessage() for record in caplog.records if "were not delivered" in record.getMessage()]
    overrides = [f"dir={events.run_dir}", f"uri={own_server.uri}"]
    assert message.endswith(f"send them with: python -m foundry.sync {' '.join(overrides)}")
    assert sync(overrides[:1]) == 2
    assert sync(overrides) == 1
    assert pending.exists()

    own_server.start()
    assert send_pending(events.run_dir, own_server.uri) > 0
    assert not pending.exists()
    assert send_pending(events.run_dir) == 0
    run = run_of(events.run_dir, own_server.uri)
    assert (run.info.status, run.data.params["hparams.lr"], run.data.tags["config_hash"]) == (
        "FINISHED",
        "0.001",
        "c0ffee",
    )
    history = client_of(own_server.uri).get_metric_history(run.info.run_id, "train/loss")
    assert [point.step for point in history] == list(range(1, 50))


def test_next_start_sends_pending_mlflow_records(events, with_database):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        refused = f"http://127.0.0.1:{taken.getsockname()[1]}"
        follow(MLflowTracker(run_dir=events.run_dir, uri=refused, finish_seconds=20), events, 3, state="requeued")
    assert (events.run_dir / "mlflow_pending.jsonl").exists()
    tracker = MLflowTracker(run_dir=events.run_dir, finish_seconds=120)
    tracker.on_start(events.start())
    tracker.on_step(events.step(4))
    tracker.on_end(events.end())
    run = run_of(events.run_dir, tracking_uri())
    assert run.info.status == "FINISHED"
    history = client_of(tracking_uri()).get_metric_history(run.info.run_id, "train/loss")
    assert [point.step for point in history] == [1, 2, 3, 4]
    assert not (events.run_dir / "mlflow_pending.jsonl").exists()


@pytest.mark.timeout(60)  # a run that waits for the server would take minutes
def test_unresponsive_mlflow_server_does_not_delay_the_run(events, black_hole, caplog):
    tracker = MLflowTracker(run_dir=events.run_dir, uri=black_hole, finish_seconds=1.0)
    tracker.on_start(events.start())
    for step in range(1, 2001):
        tracker.on_step(events.step(step))
    tracker.on_end(events.end())
    assert "were not delivered and are kept in" in caplog.text
    operations = [json.loads(line) for line in (events.run_dir / "mlflow_pending.jsonl").read_text().splitlines()]
    assert sum(operation["op"] == "metrics" for operation in operations) == 2000
    assert operations[-1]["status"] == "FINISHED"


def test_mlflow_queue_is_bounded_and_reports_lost_records(events, black_hole, caplog, monkeypatch):
    monkeypatch.setattr("foundry.tracking.mlflow.queue._MOST_IN_MEMORY", 100)
    tracker = MLflowTracker(run_dir=events.run_dir, uri=black_hole, finish_seconds=0.5)
    tracker.on_start(events.start())
    for step in range(1, 301):
        tracker.on_step(events.step(step))
    assert len(tracker._delivery._backlog) <= 105
    tracker.on_end(events.end())
    assert "records were lost" in caplog.text


def test_credentials_in_the_mlflow_uri_are_not_stored(events, black_hole, caplog, monkeypatch, capsys):
    uri = black_hole.replace("http://", f"http://ann:{SECRET}@")
    tracker = MLflowTracker(run_dir=events.run_dir, uri=uri, finish_seconds=0.5)
    event = events.start()
    event.config["tracking"]["uri"] = uri
    tracker.on_start(event)
    tracker.on_step(events.step(1))
    tracker.on_end(events.end())
    assert SECRET not in caplog.text
    assert not [path for path in events.run_dir.iterdir() if SECRET in path.read_text()]
    assert sync([f"dir={events.run_dir}"]) == 2
    assert "set MLFLOW_TRACKING_URI or give uri=URI" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["dir="], ["dir=/missing/place"], ["dir=.", "x=1"], ["."]])
def test_sync_with_wrong_arguments_prints_its_usage(arguments, capsys):
    code = sync(arguments)
    output = capsys.readouterr()
    assert code == 2
    assert output.err.count("\n") == 1
    assert "dir=RUN_DIR" in output.err


def test_sync_without_pending_records_sends_none(tmp_path, capsys):
    assert sync([f"dir={tmp_path}"]) == 0
    assert capsys.readouterr().out == "0 records sent\n"


def test_tracking_uri_prefers_argument_then_environment_then_database(monkeypatch, with_database):
    assert tracking_uri() == f"sqlite:///{with_database}/mlflow.db"
    assert tracking_uri("sqlite:////data/x.db?timeout=5") == "sqlite:////data/x.db?timeout=5"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://host:1")
    assert tracking_uri() == "http://host:1"
    assert tracking_uri("http://chosen") == "http://chosen"
    assert Tracking().experiment_name == DEFAULT_EXPERIMENT


def test_short_waits_keep_the_users_timeouts(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    with short_waits():
        assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"
        assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "0"
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ
