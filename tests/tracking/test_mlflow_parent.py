"""The run in MLflow above those of a sweep's jobs: one, open while a job may run, and closed when none will."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from foundry.tracking.destination import Destination, tracking_uri
from foundry.tracking.mlflow_parent import ParentLink, close_parent
from foundry.tracking.mlflow_store import MlflowStore

pytestmark = pytest.mark.slow


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """A sweep's directory with three jobs."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "sweep"
    for name in ("0", "1", "2"):
        (folder / name).mkdir(parents=True)
        ParentLink.write(folder / name, folder, int(name), f"seed={name}")
        state_of(folder / name, "queued")
    (folder / "sweep.json").write_text(json.dumps({"jobs": [{"dir": name} for name in ("0", "1", "2")]}))
    return folder


def state_of(run_dir, state):
    (run_dir / "status.json").write_text(json.dumps({"state": state}))


def store_of(run_dir):
    destination = Destination.of(run_dir, uri=tracking_uri(), experiment_name="sweeps", run_name=run_dir.name)
    destination.save(run_dir)
    return MlflowStore(run_dir, destination)


def end(run_dir, state):
    state_of(run_dir, state)
    store_of(run_dir).apply([{"op": "end", "status": "FINISHED", "time_ms": 1}])


def test_one_parent_from_the_first_job_to_the_last(sweep):
    close_parent(sweep)  # nobody has logged: there is nothing to close
    assert not (sweep / "mlflow.json").exists()
    client, _ = store_of(sweep / "0").connect()
    with ThreadPoolExecutor(2) as pool:
        ids = list(pool.map(lambda name: store_of(sweep / name).connect()[1], ("1", "2")))

    def parent():
        return client.get_run(json.loads((sweep / "mlflow.json").read_text())["run_id"])

    tags = [client.get_run(run_id).data.tags for run_id in ids]
    assert {tag["mlflow.parentRunId"] for tag in tags} == {parent().info.run_id}
    assert [tag["overrides"] for tag in tags] == ["seed=1", "seed=2"]
    assert "mlflow.parentRunId" not in parent().data.tags

    end(sweep / "0", "finished")
    assert parent().info.status == "RUNNING"
    close_parent(sweep, stopped=True)
    assert parent().info.status == "KILLED"
    store_of(sweep / "1").connect()
    assert parent().info.status == "RUNNING", "a sweep that goes on has the same parent"
    end(sweep / "1", "finished")
    end(sweep / "2", "failed")
    assert parent().info.status == "FAILED"
    end(sweep / "2", "finished")
    assert parent().info.status == "FINISHED"
    assert len(client.search_runs([parent().info.experiment_id])) == 4


def test_a_job_in_another_store_has_no_parent(sweep):
    Destination.of(sweep, uri="sqlite:///one.db", experiment_name="e", run_name="r").save(sweep)
    other = Destination.of(sweep / "0", uri="sqlite:///other.db", experiment_name="e", run_name="r")
    assert ParentLink.load(sweep / "0").parent_id(sweep / "0", other) is None
