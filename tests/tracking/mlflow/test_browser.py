import json
import re
import shutil
import subprocess
from urllib.parse import quote

import numpy as np
import pytest
from support.sweep_dirs import SweepDir

from foundry.core.events import Evaluated
from foundry.sweeps.mlflow_parent import close_parent
from foundry.tasks.robots.evaluators.episodes import Film
from foundry.tasks.robots.evaluators.films import save_gif
from foundry.tracking.mlflow.destination import Destination, viewing_hint
from foundry.tracking.mlflow.parent_link import ParentLink
from foundry.tracking.mlflow.tracker import MLflowTracker
from foundry.tracking.plots import Plots

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.long,
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine"),
]
SWITCHES = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1500,1100",
    "--virtual-time-budget=30000",
]


def browse(profile, url, *switches):
    """Open a page in Chromium; return the output after the page's scripts have run."""
    command = [CHROMIUM, *SWITCHES, f"--user-data-dir={profile}", *switches, url]
    process = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    return process.stdout


def words_of(page):
    """Return the visible text of a page."""
    return " ".join(re.sub(r"<[^>]*>|&nbsp;", " ", page).split())


def test_mlflow_ui_shows_the_run(events, mlflow_server, tmp_path):
    observers = [
        Plots(run_dir=events.run_dir),
        MLflowTracker(run_dir=events.run_dir, uri=mlflow_server.uri, run_name="a run to look at", finish_seconds=120),
    ]
    for observer in observers:
        observer.on_start(events.start())
    for step in range(1, 201):
        for observer in observers:
            observer.on_step(events.step(step))
    for observer in observers:
        observer.on_evaluation(events.evaluation(200))
        observer.on_end(events.end())
    destination = json.loads((events.run_dir / "mlflow.json").read_text())
    from mlflow import MlflowClient

    experiment_id = MlflowClient(mlflow_server.uri).get_run(destination["run_id"]).info.experiment_id
    page = f"{mlflow_server.uri}/#/experiments/{experiment_id}/runs/{destination['run_id']}"
    seen = browse(tmp_path / "profile", page, "--dump-dom")
    assert "a run to look at" in seen
    assert "hparams.lr" in seen
    assert "val/loss" in seen
    for number, tab in enumerate(("", "/model-metrics", "/artifacts")):
        picture = tmp_path / f"{number}.png"
        browse(tmp_path / "profile", page + tab, f"--screenshot={picture}")
        assert picture.stat().st_size > 10_000


def test_printed_mlflow_link_shows_runs_and_metric_groups(events, mlflow_server, tmp_path):
    tracker = MLflowTracker(run_dir=events.run_dir, uri=mlflow_server.uri, run_name="found at once", finish_seconds=120)
    tracker.on_start(events.start())
    tracker.on_step(events.step(1))
    tracker.on_evaluation(events.evaluation(1))
    tracker.on_end(events.end())
    run_page = viewing_hint(events.run_dir, mlflow_server.uri)
    runs_page = run_page.replace(f"/{Destination.load(events.run_dir).run_id}", "")
    assert runs_page.endswith("/runs?workflowType=machine_learning")
    assert "found at once" in words_of(browse(tmp_path / "new", runs_page, "--dump-dom"))
    read = words_of(browse(tmp_path / "newer", run_page.replace("?", "/model-metrics?"), "--dump-dom"))
    assert all(f"{group} (" in read for group in ("train", "val", "perf")), read[-3000:]


def test_mlflow_ui_shows_the_episodes_of_a_policy(events, mlflow_server, tmp_path):
    metrics = {"val_success": 0.5, "val_success_low": 0.3, "val_success_high": 0.7}
    observers = [
        Plots(run_dir=events.run_dir),
        MLflowTracker(run_dir=events.run_dir, uri=mlflow_server.uri, finish_seconds=120),
    ]
    for observer in observers:
        observer.on_start(events.start())
        observer.on_step(events.step(1))
    plots = events.run_dir / "plots"
    plots.mkdir()
    film = Film(10.0, success=True, frames={n: np.full((96, 96, 3), 9 * n, dtype=np.uint8) for n in range(20)})
    save_gif([film] * 8, plots / "rollouts.gif")
    for observer in observers:
        observer.on_evaluation(Evaluated(step=1, samples=8, metrics=metrics, samples_file=plots / "rollouts.gif"))
        observer.on_end(events.end())
    destination = json.loads((events.run_dir / "mlflow.json").read_text())
    from mlflow import MlflowClient

    experiment_id = MlflowClient(mlflow_server.uri).get_run(destination["run_id"]).info.experiment_id
    page = f"{mlflow_server.uri}/#/experiments/{experiment_id}/runs/{destination['run_id']}"
    for name in ("rollouts.gif", "success.png"):
        read = words_of(browse(tmp_path / "profile", f"{page}/artifacts/plots/{name}", "--dump-dom"))
        assert f"plots/{name}" in read
    assert "val/success_low" in browse(tmp_path / "profile", page, "--dump-dom")


def test_mlflow_ui_shows_a_sweep_and_compares_its_jobs(events, mlflow_server, tmp_path):
    sweep_dir = SweepDir(tmp_path / "a grid", type(events), command=["-m", "optimizer=adamw,muon"])
    run_ids = []
    for number, optimizer in enumerate(("adamw", "muon")):
        run_dir = sweep_dir.job(f"optimizer={optimizer}", losses=(3.0, 2.0 - number / 2))
        ParentLink.write(run_dir, sweep_dir.folder, number, [f"optimizer={optimizer}"])
        tracker = MLflowTracker(run_dir=run_dir, uri=mlflow_server.uri, finish_seconds=120)
        tracker.on_start(events.start())
        tracker.on_step(events.step(1, loss=3.0 - number))
        tracker.on_end(events.end())
        run_ids.append(json.loads((run_dir / "mlflow.json").read_text())["run_id"])
    close_parent(sweep_dir.folder, uri=mlflow_server.uri)  # like the process of the last job
    from mlflow import MlflowClient

    child = MlflowClient(mlflow_server.uri).get_run(run_ids[1])
    experiment_id, parent_id = child.info.experiment_id, child.data.tags["mlflow.parentRunId"]
    page = browse(
        tmp_path / "profile", f"{mlflow_server.uri}/#/experiments/{experiment_id}/runs/{parent_id}", "--dump-dom"
    )
    read = words_of(page)
    for message in (
        "a grid",
        "0: optimizer=adamw",
        "1: optimizer=muon",
        "best: job 1, val_loss 1.5000, optimizer=muon",
    ):
        assert message in read
    chosen = f"runs={quote(json.dumps(run_ids))}&experiments={quote(json.dumps([experiment_id]))}"
    page = browse(tmp_path / "profile", f"{mlflow_server.uri}/#/compare-runs?{chosen}", "--dump-dom")
    read = words_of(page)
    assert "Comparing 2 Runs from 1 Experiment" in read
    assert "Parameters: optimizer Metrics: train/loss" in read  # the default selection of the plot
