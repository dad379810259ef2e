"""An untrusted run directory cannot choose the files that `foundry.sync` uploads or the server."""

import json
import os
import shlex
import sqlite3
from pathlib import Path

import pytest

from foundry.commands import sync
from foundry.tracking.mlflow.destination import Destination, sync_command, tracking_uri
from foundry.tracking.mlflow.queue import write_pending
from foundry.tracking.mlflow.store import MlflowStore, resolve_file

RECORDS = [{"op": "start"}, {"op": "metrics", "time_ms": 1, "step": 1, "values": {"loss": 0.5}}]


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("MLFLOW")]:
        monkeypatch.delenv(name)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "secret").write_text("key")
    folder = tmp_path / "run"
    (folder / "plots").mkdir(parents=True)
    return folder


@pytest.fixture
def sent(monkeypatch):
    """URIs of the stores that `sync` would send to."""
    sent = []

    def take(store, pending):
        sent.append(store._destination.uri)
        return 1

    monkeypatch.setattr(sync, "send_file", take)
    monkeypatch.setattr(sync, "_check_artifacts", lambda store, destination: None)
    return sent


def given(run_dir, *records, uri=None):
    Destination.of(run_dir, uri=uri or tracking_uri(), experiment_name="x", run_name="y").save(run_dir)
    write_pending(run_dir / "mlflow_pending.jsonl", records or RECORDS)
    return run_dir


def artifact(file, to=""):
    return {"op": "artifact", "file": file, "to": to}


LINKED = {
    "a link": lambda run_dir: (run_dir / "a link").symlink_to(run_dir.parent / "secret"),
    "plots/a link": lambda run_dir: (run_dir / "plots" / "a link").symlink_to("/etc/passwd"),
    "folder/secret": lambda run_dir: (run_dir / "folder").symlink_to(run_dir.parent),
    "a pipe": lambda run_dir: os.mkfifo(run_dir / "a pipe"),
    "plots": lambda run_dir: None,
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "record",
    [
        *map(artifact, ["/etc/passwd", "../secret", "../../.ssh/id_rsa", "plots/../../secret", "nul\0", *LINKED]),
        artifact("result.json", "../../elsewhere"),
        artifact("result.json", "/etc"),
    ],
    ids=str,
)
def test_sync_rejects_artifacts_outside_the_run_directory(run_dir, sent, capsys, record):
    (run_dir / "result.json").write_text("{}")
    LINKED.get(record["file"], lambda run_dir: None)(run_dir)
    given(run_dir, *RECORDS, record)
    assert sync.run([f"dir={run_dir}"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("nothing was sent: ")
    assert message.count("\n") == 1
    assert sent == []
    assert (run_dir / "mlflow_pending.jsonl").exists()


def test_running_store_skips_rejected_artifacts_with_a_warning(run_dir, caplog):
    """The run continues; `foundry.sync` rejects records with these artifacts."""
    uploaded = []

    class Client:
        def log_artifact(self, run_id, path, to):
            uploaded.append(path)

    store = MlflowStore(run_dir, Destination.of(run_dir, uri="x", experiment_name="x", run_name="y"))
    store._client = Client()
    store._destination = Destination(uri="x", experiment_name="x", run_name="y", run_id="1", key="k", started_ms=1)
    (run_dir / "result.json").write_text("{}")
    for file in ("../secret", "/etc/passwd", "result.json", "not there"):
        store.apply([artifact(file)])
    assert [Path(path).name for path in uploaded] == ["result.json"]
    assert caplog.text.count("not sent") == 2


def test_artifacts_in_the_run_directory_are_accepted(run_dir):
    (run_dir / "plots" / "loss.png").write_bytes(b"x")
    assert resolve_file(run_dir, artifact("plots/loss.png", "plots")) == run_dir / "plots/loss.png"


SERVERS = ["http://evil.example:5000", "databricks", "postgresql://host/db", "sqlite:////tmp/other.db", "file:///tmp/x"]


@pytest.mark.parametrize("uri", SERVERS)
def test_sync_rejects_a_store_named_by_the_run_directory_only(run_dir, sent, capsys, uri, monkeypatch):
    given(run_dir, uri=uri)
    assert sync.run([f"dir={run_dir}"]) == 2
    message = capsys.readouterr().err
    assert f"uri={uri}" in message, "the message has no remedy"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mine.example")
    assert sync.run([f"dir={run_dir}"]) == 2
    assert sent == []
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert sync.run([f"dir={run_dir}"]) == 0
    assert sent == [uri]


def test_sync_accepts_an_explicit_or_the_default_store(run_dir, sent):
    given(run_dir, uri="http://one.example")
    assert sync.run([f"dir={run_dir}", "uri=http://two.example"]) == 0
    given(run_dir)
    assert sync.run([f"dir={run_dir}"]) == 0
    assert sent == ["http://two.example", tracking_uri()]


def test_sync_takes_credentials_of_the_same_store_from_the_environment(run_dir, sent, monkeypatch, capsys):
    given(run_dir, uri="http://ann:hidden-pw@one.example")
    assert sync.run([f"dir={run_dir}"]) == 2
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ann:hidden-pw@other.example")
    assert sync.run([f"dir={run_dir}"]) == 2
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ann:hidden-pw@one.example")
    assert sync.run([f"dir={run_dir}"]) == 0
    assert sent == ["http://ann:hidden-pw@one.example"]
    assert "hidden-pw" not in capsys.readouterr().err


def test_printed_sync_command_works(run_dir, sent):
    for uri in (tracking_uri(), "http://one.example"):
        given(run_dir, uri=uri)
        command = shlex.split(sync_command(run_dir, uri))
        assert sync.run(command[3:]) == 0
    assert sent == [tracking_uri(), "http://one.example"]
    message = sync_command(run_dir, "http://ann:hidden-pw@one.example")
    assert message.startswith("MLFLOW_TRACKING_URI=http://***@one.example python ")


@pytest.mark.long
def test_sync_rejects_an_artifact_uri_changed_in_the_database(run_dir, tmp_path, capsys):
    given(run_dir, *RECORDS, artifact("authorized_keys"))
    (run_dir / "authorized_keys").write_text("key of a stranger")
    given(run_dir, *RECORDS)
    assert sync.run([f"dir={run_dir}"]) == 0
    with sqlite3.connect(tmp_path / "work" / "mlflow.db") as database:
        database.execute("update runs set artifact_uri = ?", (str(tmp_path / ".ssh"),))
    given(run_dir, artifact("authorized_keys"))
    assert sync.run([f"dir={run_dir}"]) == 2
    assert ".ssh" in capsys.readouterr().err
    assert not (tmp_path / ".ssh").exists()


PENDING = {
    "garbage": b"\x80\xff\n",
    "no JSON": b"{\n",
    "a list": b"[]\n",
    "no operation": b'{"op": "delete"}\n',
    "unhashable": b'{"op": []}\n',
    "text for a number": b'{"op": "metrics", "time_ms": "x", "step": 1, "values": {}}\n',
    "metrics of texts": b'{"op": "metrics", "time_ms": 1, "step": 1, "values": {"a": "b"}}\n',
    "params of lists": b'{"op": "params", "values": {"a": [1]}}\n',
    "number for values": b'{"op": "tags", "values": 5}\n',
    "missing": b'{"op": "artifact"}\n',
    "deep": b"[" * 100_000 + b"\n",
    "zeros": bytes(2**20) + b"\n",
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("content", PENDING)
def test_malformed_pending_records_give_a_one_line_error(run_dir, sent, capsys, content):
    given(run_dir)
    (run_dir / "mlflow_pending.jsonl").write_bytes(json.dumps(RECORDS[0]).encode() + b"\n" + PENDING[content])
    assert sync.run([f"dir={run_dir}"]) == 2
    message = capsys.readouterr().err
    assert "mlflow_pending.jsonl:2" in message
    assert message.count("\n") == 1
    assert sent == []


def test_parent_link_must_point_to_the_enclosing_sweep(run_dir, tmp_path):
    from foundry.run_dir.names import MLFLOW_PARENT
    from foundry.tracking.mlflow.parent_link import ParentLink

    (tmp_path / "sweep.json").write_text("{}")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sweep.json").write_text("{}")
    for sweep, is_taken in (("..", True), ("../other", False), (str(tmp_path / "other"), False), (".", False)):
        (run_dir / MLFLOW_PARENT).write_text(json.dumps({"sweep": sweep, "job": 1, "swept": {}}))
        assert (ParentLink.load(run_dir) is not None) == is_taken
