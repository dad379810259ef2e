"""Logged model, system metrics and later evaluations of a run in MLflow, read with MLflow's own functions."""

import json
import math
from dataclasses import replace

import pytest
from support.composition import configure
from support.evaluated import evaluate
from support.tiny import SMALL_LM

from foundry.commands.sync import send_metrics
from foundry.core.errors import ConfigError
from foundry.engine.train import train
from foundry.tracking.mlflow.destination import Destination, local_page, tracking_uri, viewing_hint
from foundry.tracking.mlflow.logged_model import log_model
from foundry.tracking.mlflow.tracker import MLflowTracker

SECRET = "canary-77c0ffee"


def client_of(folder):
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{folder}/mlflow.db")


@pytest.mark.long
def test_log_model_logs_a_model_that_mlflow_loads(with_database, monkeypatch, caplog):
    import mlflow

    from foundry.engine.restore import restore

    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.3")
    monkeypatch.setenv("OWN_TOKEN", SECRET)
    (with_database / "text.txt").write_text("Count the dogs that run. It is 1, it is 2.\n" * 200)
    text = ["data=text", f"data.path={with_database / 'text.txt'}", "data.vocab_size=300", "precision=fp32"]
    kept = ["tracking.mlflow=true", "tracking.log_model=true", "tracking.system_metrics=true"]
    tags = ["+tracking.tags.hf_token=${oc.env:OWN_TOKEN}", "tracking.note=${oc.env:OWN_TOKEN}"]
    quiet = ["tracking.progress=false", "evaluation.write_samples=false", "peft=lora", "optimizer=adamw"]
    run_dir = with_database / "run"
    train(configure(*SMALL_LM, *text, *kept, *tags, *quiet, "hparams.max_steps=3"), run_dir)

    assert not [record for record in caplog.records if record.levelname == "WARNING" and "MLflow" in record.message]
    destination, client = Destination.load(run_dir), client_of(with_database)
    run = client.get_run(destination.run_id)
    assert (run.info.status, run.info.experiment_id) == ("FINISHED", destination.experiment_id)
    (output,) = run.outputs.model_outputs
    best = json.loads((run_dir / "result.json").read_text())["best"]["step"]
    model = client.get_logged_model(output.model_id)
    assert (model.name, model.status, model.source_run_id) == ("run", "READY", destination.run_id)
    assert (model.experiment_id, model.tags["checkpoint"]) == (destination.experiment_id, f"step_{best:08d}")
    assert output.step == best
    assert model.artifact_location.startswith(f"file://{with_database}/mlruns/foundry/models/")

    assert {"system/cpu_utilization_percentage", "system/system_memory_usage_megabytes"} <= set(run.data.metrics)

    log_model(client, destination.run_id, run_dir, f"step_{best:08d}", trust=False)
    assert len(client.get_run(destination.run_id).outputs.model_outputs) == 1, "twice is once"

    monkeypatch.chdir(with_database)
    mlflow.set_tracking_uri(f"sqlite:///{with_database}/mlflow.db")
    pipeline = mlflow.transformers.load_model(f"models:/{output.model_id}")
    prompt = pipeline.tokenizer("Count the dogs", return_tensors="pt").input_ids
    own = restore(run_dir, "best", ema=True).model
    theirs = pipeline.model(prompt).logits
    assert (theirs - own(prompt, return_logits=True).logits).abs().max() < 2e-5
    answers = mlflow.pyfunc.load_model(f"models:/{output.model_id}").predict(["Count the dogs"])
    assert answers[0].startswith("Count the dogs")

    measured = evaluate(run=str(run_dir), max_samples=4)
    values = client.get_run(destination.run_id).data.metrics
    assert {values[f"eval/{name}"] for name in ("loss", "perplexity")} == {measured["loss"], measured["perplexity"]}
    (point,) = client.get_metric_history(destination.run_id, "eval/loss")
    assert point.step == 3
    evaluate([*text[:3], "data.seq_len=32", "objective=next_token"], run=str(run_dir), max_samples=4)
    assert "eval/text/loss" in client.get_run(destination.run_id).data.metrics
    assert client.get_run(destination.run_id).info.status == "FINISHED"
    kept_files = [path for path in with_database.rglob("*") if path.is_file()]
    assert not [path for path in kept_files if SECRET.encode() in path.read_bytes()]


def test_log_model_is_refused_without_mlflow_checkpoints_or_export():
    def refused(*overrides):
        with pytest.raises(ConfigError) as error:
            configure(*SMALL_LM, "tracking.mlflow=true", *overrides)
        return str(error.value)

    assert refused("tracking.mlflow=false", "tracking.log_model=true").startswith(
        "tracking.log_model: is true but MLfl"
    )
    assert refused("tracking.mlflow=false", "tracking.system_metrics=true").startswith(
        "tracking.system_metrics: is tru"
    )
    off = ["checkpoint.save_final=false", "checkpoint.interval=null", "checkpoint.every_minutes=null"]
    nothing = refused("tracking.log_model=true", *off, "checkpoint.keep_best.metric=null")
    assert nothing == "tracking.log_model: is true but no checkpoint is kept; set checkpoint.save_final=true"
    with pytest.raises(
        ConfigError, match=r"^tracking.log_model: is true but model is DiT, which transformers cannot load"
    ):
        configure("hparams=diffusion", "tracking.log_model=true")
    expected = "tracking.log_model: is true but transformers cannot load a model with model.residual_scalars; leave one"
    assert refused("tracking.log_model=true", "model.residual_scalars=true").startswith(expected)


@pytest.mark.long
def test_log_model_warns_if_the_export_fails(events, with_database, caplog):
    tracker = MLflowTracker(run_dir=events.run_dir, finish_seconds=120)
    tracker.on_start(events.start())
    tracker.on_end(events.end())
    run_id, client = Destination.load(events.run_dir).run_id, client_of(with_database)
    log_model(client, run_id, events.run_dir, "step_00000001", trust=False)
    (message,) = [record.message for record in caplog.records if "is not logged" in record.message]
    assert message.startswith(f"MLflow: the model of {events.run_dir} is not logged: run: ")
    assert message.endswith("is not a run directory: it has no config.yaml")
    assert not client.get_run(run_id).outputs.model_outputs


def test_send_metrics_adds_to_the_mlflow_run(events, with_database):
    assert send_metrics(events.run_dir, {"eval/loss": 1.0}, step=3) is None, "the run is kept nowhere"
    tracker = MLflowTracker(run_dir=events.run_dir, finish_seconds=120)
    tracker.on_start(events.start())
    tracker.on_end(events.end())
    destination = Destination.load(events.run_dir)
    said = send_metrics(events.run_dir, {"eval/loss": 1.0, "eval/sums/acc": math.nan}, step=3)
    assert said == f"MLflow: added to run {destination.run_id}"
    run = client_of(with_database).get_run(destination.run_id)
    assert (run.info.status, run.data.metrics["eval/loss"]) == ("FINISHED", 1.0)


@pytest.mark.long
def test_send_metrics_keeps_records_if_the_server_does_not_respond(events, with_database, black_hole):
    uri = f"sqlite:///{with_database}/mlflow.db"
    tracker = MLflowTracker(run_dir=events.run_dir, finish_seconds=120)
    tracker.on_start(events.start())
    tracker.on_end(events.end())
    destination = Destination.load(events.run_dir)
    replace(destination, uri=black_hole).save(events.run_dir)
    refused = send_metrics(events.run_dir, {"eval/loss": 2.0}, step=3)
    assert refused.startswith(f"MLflow: not sent: mlflow.json names {black_hole}, which is not {uri}")
    waiting = send_metrics(events.run_dir, {"eval/loss": 2.0}, step=3, uri=black_hole)
    assert waiting.endswith(f"send it with: python -m foundry.sync dir={events.run_dir} uri={black_hole}")
    (kept,) = (events.run_dir / "mlflow_pending.jsonl").read_text().splitlines()
    assert json.loads(kept)["values"] == {"eval/loss": 2.0}


def test_viewing_hint_gives_the_page_of_a_run_or_an_mlflow_ui_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    command = "mlflow ui --backend-store-uri"
    assert viewing_hint(tmp_path) == f"{command} sqlite:///{tmp_path}/mlflow.db"
    assert viewing_hint(tmp_path, "sqlite:///a b.db") == f"{command} 'sqlite:///{tmp_path}/a b.db'"
    training = "?workflowType=machine_learning"
    assert local_page(tmp_path) == f"http://127.0.0.1:5000/#/experiments{training}", "the store has not answered yet"
    kept = Destination.of(tmp_path, uri=tracking_uri(), experiment_name="e", run_name="r")
    replace(kept, run_id="c0de", experiment_id="7").save(tmp_path)
    assert local_page(tmp_path) == f"http://127.0.0.1:5000/#/experiments/7/runs{training}"
    server = "https://ann:hunter2@mlflow.example/own/"
    assert local_page(tmp_path, server) is None
    made = Destination.of(tmp_path, uri=server, experiment_name="e", run_name="r")
    made.save(tmp_path)
    assert viewing_hint(tmp_path, server) == "https://***@mlflow.example/own/", "the server has not answered yet"
    replace(made, run_id="c0de", experiment_id="7").save(tmp_path)
    assert (
        viewing_hint(tmp_path, server)
        == "https://mlflow.example/own/#/experiments/7/runs/c0de?workflowType=machine_learning"
    )
    assert "hunter2" not in (tmp_path / "mlflow.json").read_text()
