"""Creation of the MLflow database: concurrent processes, kills, and half-created databases."""

import subprocess
import sys

import pytest

_CONNECT = """
import sys, time
from pathlib import Path
from foundry.tracking.mlflow.destination import Destination, tracking_uri
from foundry.tracking.mlflow.store import MlflowStore

import mlflow  # noqa: F401

run_dir = Path(sys.argv[1])
run_dir.mkdir()
destination = Destination.of(run_dir, uri=tracking_uri(), experiment_name="first", run_name=run_dir.name)
print("ready", flush=True)
sys.stdin.read()
client, run_id = MlflowStore(run_dir, destination).connect()
print(client.get_run(run_id).info.run_name)
"""


# Imports MLflow once, which takes longest, and forks a process for each connection to the database.
_KILLED = """
import os, signal, sys
from pathlib import Path
from foundry.tracking.mlflow.store import _quiet_client

import mlflow.store.tracking.sqlalchemy_store
from sqlalchemy import event
from sqlalchemy.engine import Engine

count, statements = 0, None

@event.listens_for(Engine, "before_cursor_execute")
def kill_later(*_):
    global count
    count += 1
    if count == statements:
        os.kill(os.getpid(), signal.SIGKILL)

def connect():
    client = _quiet_client(f"sqlite:///{Path('mlflow.db').absolute()}")
    location = Path('mlruns').absolute().as_uri()
    client.log_text(client.create_run(client.create_experiment('e', location)).info.run_id, 'written', 'text')

def ended(folder, kill_at):
    global statements
    if (process := os.fork()) == 0:
        statements = kill_at
        os.chdir(folder)
        connect()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.wait()[1])

for moment in sys.argv[1:]:
    assert ended("database", int(moment)) == -signal.SIGKILL
    assert os.listdir("database") and not Path("database", "mlflow.db").exists()
assert ended("database", None) == 0
"""


@pytest.mark.long
def test_one_process_creates_the_mlflow_tables_and_others_wait(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _CONNECT, name],
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b", "c")
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
    for process in processes:
        process.stdin.close()
        process.stdin = None
    message = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], message
    assert [out for out, _ in message] == ["a\n", "b\n", "c\n"]
    assert not list(tmp_path.glob("*.lock"))


@pytest.mark.long
def test_kill_during_creation_of_the_mlflow_database_is_harmless(tmp_path):
    """Kill at nine SQL statements, each time a process that finds the files of all earlier kills.

    The last process creates the tables, and no temporary files remain.
    """
    moments = ["1", "3", "10", "20", "40", "80", "120", "200", "300"]
    (tmp_path / "database").mkdir()
    subprocess.run([sys.executable, "-c", _KILLED, *moments], cwd=tmp_path, check=True)
    assert {path.name for path in (tmp_path / "database").iterdir()} == {"mlflow.db", "mlruns"}


def test_half_created_mlflow_database_is_an_error_with_a_remedy(tmp_path):
    import sqlite3
    from contextlib import closing

    from foundry.tracking.mlflow.store import IncompleteDatabaseError, _quiet_client

    database = tmp_path / "mlflow.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE experiments (experiment_id INTEGER)")
        connection.execute("CREATE TABLE alembic_version (version_num VARCHAR(32))")
        connection.execute("INSERT INTO alembic_version VALUES ('acf3f17fdcc7')")
        connection.commit()
    with pytest.raises(IncompleteDatabaseError, match=r"mlflow\.db is incomplete: .* delete it$"):
        _quiet_client(f"sqlite:///{database}")


def test_empty_mlflow_file_becomes_a_database(tmp_path):
    from foundry.tracking.mlflow.store import _quiet_client

    (tmp_path / "mlflow.db").touch()
    client = _quiet_client(f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert client.get_experiment("0").name == "Default"
