"""A database that does not exist yet, and several processes that want to write to it."""

import subprocess
import sys

import pytest

_CONNECT = """
import sys, time
from pathlib import Path
from foundry.tracking.destination import Destination, tracking_uri
from foundry.tracking.mlflow_store import MlflowStore

import mlflow  # noqa: F401

run_dir = Path(sys.argv[1])
run_dir.mkdir()
destination = Destination.of(run_dir, uri=tracking_uri(), experiment_name="first", run_name=run_dir.name)
print("ready", flush=True)
sys.stdin.read()
client, run_id = MlflowStore(run_dir, destination).connect()
print(client.get_run(run_id).info.run_name)
"""


@pytest.mark.slow
def test_one_makes_its_tables_and_the_others_wait(tmp_path):
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
    said = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], said
    assert [out for out, _ in said] == ["a\n", "b\n", "c\n"]
    assert not list(tmp_path.glob("*.lock"))
