"""Trackers of a run's configuration: TensorBoard, Weights & Biases, and a user's own."""

import logging
import socket
import struct
import sys
import threading

import pytest
import yaml
from support.tiny import TINY_DIT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from foundry import ConfigError, compose, run
from foundry.config.record.frozen import load_config, save_config
from foundry.tracking.metrics_file import read_metrics
from foundry.tracking.tensorboard import TensorBoard
from foundry.tracking.wandb import WandB

QUIET = [*TINY_DIT, "hparams.max_steps=2", "tracking.progress=false", "tracking.plots=false", "checkpoint=none"]
OWN = """
from pathlib import Path

class Csv:
    def __init__(self, *, run_dir, separator=";"):
        self.path, self.separator = Path(run_dir) / "loss.csv", separator

    def on_step(self, event):
        with self.path.open("a") as file:
            file.write(f"{event.step}{self.separator}{event.loss}\\n")

class Broken:
    def on_step(self, event):
        raise LookupError("unknown table")
"""


@pytest.fixture(autouse=True)
def _own_parts(tmp_path, monkeypatch):
    (tmp_path / "owntrackers.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("owntrackers", None)


def scalars(folder):
    """Return the scalars of TensorBoard's event files by tag and step."""
    events = EventAccumulator(str(folder)).Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_tensorboard_has_the_scalars_of_metrics_jsonl(tmp_path):
    result = run(compose([*QUIET, "tracking=tensorboard", "tracking.mlflow=false"]), tmp_path / "run")
    written = scalars(tmp_path / "run/tensorboard")
    records = read_metrics(result.run_dir)
    steps = {record["step"]: record for record in records if "loss" in record}
    assert written["train/loss"] == pytest.approx({step: record["loss"] for step, record in steps.items()})
    assert written["train/lr"] == pytest.approx({step: record["lr"] for step, record in steps.items()})
    held_out = {record["step"]: record["val_loss"] for record in records if "val_loss" in record}
    assert written["val/loss"] == pytest.approx(held_out)
    assert load_config(result.run_dir).tracking.trackers["tensorboard"]["folder"] == "tensorboard"


def test_tensorboard_drops_steps_that_a_resumed_run_repeats(tmp_path, events):
    for steps, start in (((1, 2, 3), 0), ((3, 4), 2)):
        tracker = TensorBoard(run_dir=tmp_path)
        tracker.on_start(events.start(step=start))
        for step in steps:
            tracker.on_step(events.step(step, loss=float(10 * start + step)))
        tracker.on_end(events.end())
    assert scalars(tmp_path / "tensorboard")["train/loss"] == {1: 1.0, 2: 2.0, 3: 23.0, 4: 24.0}


def test_tensorboard_keeps_flat_metric_names_of_an_older_run(tmp_path, events):
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "events.out.tfevents.1.host").touch()
    tracker = TensorBoard(run_dir=tmp_path)
    tracker.on_start(events.start(step=1))
    tracker.on_step(events.step(2, loss=2.0))
    tracker.on_evaluation(events.evaluation(2))
    tracker.on_end(events.end())
    written = scalars(tmp_path / "tensorboard")
    assert (written["loss"], written["val_loss"]) == ({2: 2.0}, {2: 3.5})
    assert not [tag for tag in written if "/" in tag]


@pytest.fixture
def nobody(monkeypatch):
    """A server in place of W&B's; yields the list of accepted connections."""
    server, connected = socket.create_server(("127.0.0.1", 0)), []

    def accept():
        while True:
            try:
                connected.append(server.accept())
            except OSError:
                return

    threading.Thread(target=accept, daemon=True).start()
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", "/dev/null")
    yield connected
    server.shutdown(socket.SHUT_RDWR)
    server.close()


def leveldb_records(data, *, offset, block=32768, header=7):
    """Yield the records of a LevelDB log: checksum, length, kind (full, first, middle, last) and content, in blocks."""
    at, content = 0, b""
    while at + header <= len(data):
        if (left := block - (offset + at) % block) < header:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        content += data[at + header : at + header + length]
        at += header + length
        if kind in (1, 4):
            yield content
            content = b""


def history(run_dir):
    """Return the logged records of a run that W&B recorded offline."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # W&B's writer process may hold unwritten records after the end of a run
    (path,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    records = []
    for data in leveldb_records(path.read_bytes()[7:], offset=7):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            records.append({item.key or "/".join(item.nested_key): item.value_json for item in record.history.item})
    return records


@pytest.mark.long
def test_wandb_records_offline_without_a_key_or_a_connection(tmp_path, nobody):
    words = ["tracking=wandb", "tracking.trackers.wandb.mode=offline", "tracking.experiment_name=tried"]
    result = run(compose([*QUIET, *words]), tmp_path / "run")
    logged = {int(record["_step"]): record for record in history(result.run_dir)}
    for record in read_metrics(result.run_dir):
        for name, grouped in (("loss", "train/loss"), ("val_loss", "val/loss")):
            if name in record:
                assert float(logged[record["step"]][grouped]) == pytest.approx(record[name])
    assert nobody == []


@pytest.mark.long
def test_wandb_online_without_a_key_records_offline_without_connecting(tmp_path, events, nobody, caplog):
    tracker = WandB(run_dir=tmp_path)
    tracker.on_start(events.start())
    tracker.on_step(events.step(1, loss=2.5))
    tracker.on_end(events.end())
    assert [float(record["train/loss"]) for record in history(tmp_path)] == [2.5]
    assert "no key for Weights & Biases" in caplog.text
    assert nobody == []


def test_own_tracker_outside_foundry_is_called(tmp_path):
    own = ["tracking=none", "+tracking.trackers.csv._target_=owntrackers.Csv", "+tracking.trackers.csv.separator=' '"]
    result = run(compose([*QUIET, *own]), tmp_path / "run")
    lines = (tmp_path / "run/loss.csv").read_text().splitlines()
    assert [int(line.split()[0]) for line in lines] == [1, 2]
    assert float(lines[-1].split()[1]) == result.result["loss"]


def test_exception_of_a_tracker_is_a_warning(tmp_path, caplog):
    own = ["tracking=none", "+tracking.trackers.broken._target_=owntrackers.Broken"]
    with caplog.at_level(logging.WARNING):
        assert run(compose([*QUIET, *own]), tmp_path / "run").result["step"] == 2
    assert [record.getMessage() for record in caplog.records if "unknown table" in record.getMessage()] == [
        "broken.on_step: LookupError: unknown table (the run continues; logged once)"
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["tracking=wandb", "tracking.trackers.wandb.mode=often"],
            "tracking.trackers.wandb.mode: is often but must be",
        ),
        (["+tracking.trackers.mine=3"], "tracking.trackers.mine: is 3 but must be null or have a _target_"),
        *(
            ([f"+tracking.trackers.mine._target_={value}"], "mine._target_: is ")
            for value in ("3", "null", "[1]", "[[[[1]]]]", "{a: 1}", "{a: [1]}", "''")
        ),
        (
            ["+tracking.trackers.mine._target_=owntrackers.Cvs"],
            "tracking.trackers.mine._target_: is owntrackers.Cvs but",
        ),
        (
            ["+tracking.trackers.mine._target_=owntrackers.Csv", "+tracking.trackers.mine.seperator=x"],
            "tracking.trackers.mine.seperator: is not an argument of owntrackers.Csv; did you mean separator?",
        ),
        (
            ["+tracking.trackers.mine._target_=owntrackers.Csv", "+tracking.trackers.mine.api_key=c4n4ry"],
            "tracking.trackers.mine.api_key: is a secret",
        ),
    ],
)
def test_invalid_trackers_are_refused(overrides, message):
    with pytest.raises(ConfigError) as refused:
        compose([*QUIET, *overrides])
    assert message in str(refused.value)
    assert "c4n4ry" not in str(refused.value)


@pytest.mark.parametrize("extra", ["tensorboard", "wandb"])
def test_missing_tracker_package_is_refused_with_the_install_command(extra, monkeypatch):
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(ConfigError, match=rf"tracking\.trackers\.{extra}: needs .* pip install '?{extra}"):
        compose([*QUIET, f"tracking={extra}"])
    assert compose([*QUIET, f"tracking={extra}", f"tracking.trackers.{extra}=null"]).tracking.trackers == {extra: None}


@pytest.mark.parametrize(
    "trackers",
    [
        {"mine": {"_target_": "os.system"}},
        {"tensorboard": {"_target_": "foundry.TensorBoard", "run_dir": {"_target_": "os.getcwd"}}},
        {"mine": {"_target_": {}}},
        {"mine": {"nested": {"_target_": "foundry.WandB"}}},
    ],
)
def test_recorded_tracker_outside_foundry_needs_trust(tmp_path, trackers):
    save_config(compose([*QUIET, "tracking=none"]), tmp_path)
    recorded = yaml.safe_load((tmp_path / "config.yaml").read_text())
    recorded["tracking"]["trackers"] = trackers
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(recorded))
    with pytest.raises(ConfigError, match=r"uses custom code: tracking\.trackers\."):
        load_config(tmp_path)
