"""Fixtures for tests of observers: events of a run, and MLflow stores."""

import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from foundry.core.events import Evaluated, PlannedUpdate, RunEnded, RunStarted, StepLogged
from support.built_once import built_once


class Events:
    """The events of a short run."""

    def __init__(self, run_dir):
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)

    def start(self, **changes):
        config = {
            "hparams": {"lr": 0.001, "global_batch_size": 32, "per_gpu_batch_size": 4},
            "precision": {"mode": "amp_bfloat16"},
            "tracking": {"mlflow": True, "uri": None},
        }
        plan = {
            "world_size": 2,
            "accum_freq": 4,
            "total_steps": 200,
            "total_samples": 6400,
            "tokens_per_sample": 128,
            "parameters": 1_234_567,
            "device": "NVIDIA H200",
            "notes": {"unigram_entropy": 3.25},
        }
        updates = [
            PlannedUpdate(
                step=step,
                samples=32 * step,
                global_batch_size=32,
                lr=1e-3 * min(step / 20, (220 - step) / 200),
                weight_decay=0.1,
            )
            for step in range(1, 201)
        ]
        fields = {"run_dir": self.run_dir, "config": config, "config_hash": "c0ffee", "plan": plan, "updates": updates}
        return RunStarted(**(fields | changes))

    def step(self, step, **changes):
        fields = {
            "step": step,
            "samples": step * 32,
            "tokens": step * 4096,
            "epoch": step / 100,
            "loss": 4.0 / step**0.2,
            "lr": 1e-3,
            "weight_decay": 0.1,
            "grad_norm": 0.5,
            "global_batch_size": 32,
            "samples_per_second": 320.0,
            "tokens_per_second": 40960.0,
            "step_seconds": 0.1,
            "tflops": None,
            "mfu": None,
            "peak_memory_bytes": 1_000_000,
            "metrics": {"accuracy": 0.25},
        }
        return StepLogged(**(fields | changes))

    def evaluation(self, step, **changes):
        fields = {"step": step, "samples": step * 32, "metrics": {"val_accuracy": 0.2}} | changes
        fields["metrics"] = {"val_loss": fields.pop("val_loss", 3.5)} | fields["metrics"]
        return Evaluated(**fields)

    def end(self, **changes):
        result = {"status": "finished", "step": 200, "loss": 1.5, "val_loss": 1.75}
        return RunEnded(**({"state": "finished", "reason": "", "result": result} | changes))


@pytest.fixture
def events(tmp_path):
    return Events(tmp_path / "run")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Server:
    """A real MLflow server on the loopback interface."""

    def __init__(self, folder, port=None):
        self.folder, self.port = Path(folder), port or free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process = None

    def start(self):
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self.folder}/server.db"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
        environment["MLFLOW_DISABLE_TELEMETRY"] = "true"
        environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
        log = (self.folder / "server.log").open("ab")
        self.process = subprocess.Popen(
            command, cwd=self.folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        log.close()
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urlopen(f"{self.uri}/health", timeout=2) as answer:
                    if answer.status == 200:
                        return self
            except (URLError, OSError):
                time.sleep(0.3)
        self.stop()
        raise RuntimeError((self.folder / "server.log").read_text()[-2000:])

    def stop(self):
        """Kill the server and its workers, which share its session."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, 9)
            self.process.wait(timeout=30)
            self.process = None


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory, cache):
    """An MLflow database without runs, to copy: creating one takes seconds."""

    def build(folder):
        from mlflow import MlflowClient

        MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()

    return built_once("database", build, cache, tmp_path_factory) / "mlflow.db"


@pytest.fixture
def with_database(tmp_path, empty_database, monkeypatch):
    """The current directory, with a private MLflow database."""
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory, empty_database):
    server = Server(tmp_path_factory.mktemp("mlflow"))
    shutil.copy(empty_database, server.folder / "server.db")
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture
def own_server(tmp_path, empty_database):
    """A server that a test may kill and restart."""
    (tmp_path / "server").mkdir()
    server = Server(tmp_path / "server")
    shutil.copy(empty_database, server.folder / "server.db")
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture
def black_hole():
    """The address of a server that accepts connections and never responds."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(autouse=True)
def no_mlflow_of_the_user(monkeypatch):
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)


class Interrupted(Exception):
    """The exception of `EndsAfter`."""


class EndsAfter:
    """An observer that raises `Interrupted` after the given step."""

    def __init__(self, step):
        self._step = step

    def on_start(self, event):
        pass

    on_evaluation = on_end = on_start

    def on_step(self, event):
        if event.step == self._step:
            raise Interrupted
