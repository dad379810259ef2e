"""MLflow parent run of a sweep's jobs: open while a job may run, and closed with the results of the sweep."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.sweep_dirs import SweepDir

from foundry.sweeps.mlflow_parent import close_parent, close_parent_of_job
from foundry.tracking.mlflow.destination import Destination, tracking_uri
from foundry.tracking.mlflow.parent_link import ParentLink
from foundry.tracking.mlflow.store import MlflowStore, parent_id
from foundry.tracking.mlflow.tracker import MLflowTracker

SECRET = "hunter2hunter2"


@pytest.fixture
def sweep(with_database, events):
    """A sweep's directory with three jobs."""
    sweep_dir = SweepDir(with_database / "sweep", type(events), command=["-m", "seed=0,1,2"], launcher="local")
    for number in range(3):
        run_dir = sweep_dir.job(f"hparams.seed={number}", losses=(3.0, 2.5 - number / 2), shared=["debug=fast"])
        ParentLink.write(run_dir, sweep_dir.folder, number, [f"hparams.seed={number}"])
        state_of(run_dir, "queued")
    return sweep_dir.folder


def state_of(run_dir, state):
    (run_dir / "status.json").write_text(json.dumps({"state": state}))


def store_of(run_dir):
    destination = Destination.of(run_dir, uri=tracking_uri(), experiment_name="sweeps", run_name=run_dir.name)
    destination.save(run_dir)
    return MlflowStore(run_dir, destination)


def end(run_dir, state):
    state_of(run_dir, state)
    store_of(run_dir).apply([{"op": "end", "status": "FINISHED", "time_ms": 1}])
    close_parent_of_job(run_dir)


@pytest.mark.long
def test_mlflow_parent_is_shared_by_all_jobs_and_closed_after_the_last(sweep):
    close_parent(sweep)  # no job has logged yet, so there is no run to close
    assert not (sweep / "mlflow.json").exists()
    client, _ = store_of(sweep / "0").connect()
    with ThreadPoolExecutor(2) as pool:
        ids = list(pool.map(lambda name: store_of(sweep / name).connect()[1], ("1", "2")))

    def parent():
        return client.get_run(json.loads((sweep / "mlflow.json").read_text())["run_id"])

    tags = [client.get_run(run_id).data.tags for run_id in ids]
    assert {tag["mlflow.parentRunId"] for tag in tags} == {parent().info.run_id}
    assert [(tag["overrides"], tag["sweep_job"]) for tag in tags] == [("hparams.seed=1", "1"), ("hparams.seed=2", "2")]
    assert "mlflow.parentRunId" not in parent().data.tags
    assert parent().data.tags["command"] == "python -m foundry -m seed=0,1,2"
    assert parent().data.tags["metric"] == "val_loss"

    end(sweep / "0", "finished")
    assert (parent().info.status, parent().data.metrics) == ("RUNNING", {})
    close_parent(sweep, stopped=True)
    assert (parent().info.status, parent().data.tags["best_job"]) == ("KILLED", "0")
    store_of(sweep / "1").connect()
    assert parent().info.status == "RUNNING", "a sweep that is resumed has the same parent"
    end(sweep / "1", "finished")
    end(sweep / "2", "failed")
    assert (parent().info.status, parent().data.tags["jobs"]) == ("FAILED", "2 finished, 1 failed")
    end(sweep / "2", "finished")
    assert parent().info.status == "FINISHED"
    assert len(client.search_runs([parent().info.experiment_id])) == 4

    assert parent().data.metrics == {"val/loss": 1.5}
    assert {
        "jobs": "3 finished",
        "best_job": "2",
        "best_overrides": "hparams.seed=2",
    }.items() <= parent().data.tags.items()
    assert "python -m foundry debug=fast hparams.seed=2" in parent().data.tags["mlflow.note.content"]
    files = [file.path for file in client.list_artifacts(parent().info.run_id)]
    assert files == ["report.csv", "report.json", "report.png"]
    before = parent()
    close_parent(sweep)
    assert parent().info.end_time == before.info.end_time, "nothing is left to do"


@pytest.mark.long
def test_mlflow_parent_is_closed_if_its_report_fails(sweep, caplog):
    (sweep / "report.csv").mkdir()
    client, _ = store_of(sweep / "0").connect()
    close_parent(sweep, stopped=True)
    assert client.get_run(json.loads((sweep / "mlflow.json").read_text())["run_id"]).info.status == "KILLED"
    assert "has no report: " in caplog.text


def test_mlflow_job_run_has_swept_overrides_as_name_and_parameters(with_database, events):
    overrides = ("hparams.lr=0.0012345678901234", "optimizer=muon", f"data.hf_token={SECRET}")
    sweep_dir = SweepDir(with_database / "sweep", type(events), command=["hparams_search=mine"])
    run_dir = sweep_dir.job(*overrides[:2])
    ParentLink.write(run_dir, sweep_dir.folder, 0, overrides)
    tracker = MLflowTracker(run_dir=run_dir, finish_seconds=120)
    start = events.start()
    start.config["hparams"]["lr"] = 0.0012345678901234
    tracker.on_start(start)
    tracker.on_step(events.step(1))
    tracker.on_evaluation(events.evaluation(1))
    tracker.on_end(events.end(result={"step": 9, "val_loss": 3.0, "best": {"step": 5, "val_loss": 2.5}}))

    client, run_id = store_of(run_dir).connect()
    run = client.get_run(run_id)
    assert run.info.run_name == "0: lr=0.001235 optimizer=muon hf_token=***"
    assert (run.data.params["hparams.lr"], run.data.params["optimizer"]) == ("0.0012345678901234", "muon")
    assert run.data.params["data.hf_token"] == "***"
    assert run.data.metrics["val/best_loss"] == 2.5
    assert [point.step for point in client.get_metric_history(run_id, "val/best_loss")] == [5]
    assert next(iter(run.data.metrics)) == "train/loss", "MLflow's comparison opens with the first"
    assert run.data.tags["command"] == "python -m foundry hparams.lr=0.0012345678901234 optimizer=muon hydra.mode=RUN"
    assert SECRET not in (run_dir / "mlflow_parent.json").read_text()


def test_mlflow_job_run_in_another_store_has_no_parent(sweep):
    Destination.of(sweep, uri="sqlite:///one.db", experiment_name="e", run_name="r").save(sweep)
    other = Destination.of(sweep / "0", uri="sqlite:///other.db", experiment_name="e", run_name="r")
    assert parent_id(sweep, other) is None


def test_parent_link_ignores_a_copied_run_directory(sweep, tmp_path):
    (tmp_path / "mine").mkdir()
    shutil.copytree(sweep / "0", tmp_path / "mine" / "copy")
    assert ParentLink.load(sweep / "0").job == 0
    assert ParentLink.load(tmp_path / "mine" / "copy") is None
    assert ParentLink.load(tmp_path / "mine") is None


def test_sweep_started_with_flat_metric_names_keeps_them(sweep):
    Destination.of(sweep, uri=tracking_uri(), experiment_name="e", run_name="r").save(sweep)
    content = json.loads((sweep / "mlflow.json").read_text())
    assert Destination.load(sweep).evaluation_name("val_loss") == "val/loss"
    (sweep / "mlflow.json").write_text(json.dumps({k: v for k, v in content.items() if k != "metric_names"}))
    added = Destination.of(
        sweep / "0", uri=tracking_uri(), experiment_name="e", run_name="r", sweep_dir=sweep / "0" / ".."
    )
    assert added.metric_names == "flat"
    assert Destination.load(sweep).evaluation_name("val_loss") == "val_loss"
