"""Location of a run in MLflow, and the file in the run directory that records it."""

import json
import os
import shlex
import time
import uuid
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import NoneType

from foundry.config.environment import default_variables
from foundry.run_dir.files import write_atomically
from foundry.run_dir.names import MLFLOW, MLFLOW_PENDING
from foundry.run_dir.redact import MASK, masked_text
from foundry.run_dir.strict_json import DamagedFileError, Types, read_object
from foundry.tracking.metric_groups import FLAT, GROUPED, evaluation_name

DEFAULT_URI = "sqlite:///mlflow.db"
DEFAULT_EXPERIMENT = "foundry"
_TYPES: dict[str, Types] = {"uri": str, "experiment_name": str, "run_name": str, "key": str, "started_ms": int}
_IDS = ("run_id", "experiment_id")
_STYLE = "metric_names"
_SQLITE = "sqlite:///"
_LOCAL_SERVER = "http://127.0.0.1:5000"  # default address of `mlflow ui`
_TRAINING = "?workflowType=machine_learning"  # without this, a new browser shows the pages for GenAI

# By default, MLflow waits 120 s, retries for minutes, prints a greeting and reports usage over the network.
SHORT_WAITS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


def short_waits() -> AbstractContextManager[None]:
    """Return a context with short timeouts and little output of MLflow.

    Variables that the user has set keep their value.
    """
    return default_variables(SHORT_WAITS)


def tracking_uri(uri: str | None = None) -> str:
    """Return the tracking URI: the argument, else MLFLOW_TRACKING_URI, else a database in the current directory.

    A database's path becomes absolute, so that it does not depend on the current directory.
    """
    store_uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI
    if database := sqlite_file(store_uri):
        _, mark, query = store_uri.partition("?")
        return f"{_SQLITE}{database}{mark}{query}"
    return store_uri


def sqlite_file(uri: str) -> Path | None:
    """Return the absolute path of a SQLite database; None for any other URI."""
    path = uri.removeprefix(_SQLITE).partition("?")[0]
    return Path(path).absolute() if uri.startswith(_SQLITE) and path else None


def experiment(name: str) -> str:
    """Return the experiment's name.

    MLFLOW_EXPERIMENT_NAME replaces the default name, but not a name that the user chose.
    """
    return (os.environ.get("MLFLOW_EXPERIMENT_NAME") or name) if name == DEFAULT_EXPERIMENT else name


def sync_command(run_dir: Path, uri: str) -> str:
    """Return the command that sends undelivered records.

    The command contains the URI of the store, unless `tracking_uri` finds the URI without it.
    """
    command = ["python", "-m", "foundry.sync", f"dir={run_dir.absolute()}"]
    if uri == tracking_uri():
        return shlex.join(command)
    if (masked_uri := masked_text(uri)) != uri:  # keep the URI's credentials out of the shell history
        return f"MLFLOW_TRACKING_URI={masked_uri} {shlex.join(command)}"
    return shlex.join([*command, f"uri={uri}"])


def viewing_hint(run_dir: Path, uri: str | None = None) -> str:
    """Return the URL of a run's page in MLflow, else that of the store; for a database, a command that serves it.

    Args:
        run_dir: the run directory.
        uri: tracking URI of the run; None for MLFLOW_TRACKING_URI, else the default.
    """
    store_uri = tracking_uri(uri)
    if sqlite_file(store_uri) is not None:
        return shlex.join(["mlflow", "ui", "--backend-store-uri", masked_text(store_uri)])
    destination = Destination.load(run_dir)
    return (None if destination is None else destination.page) or masked_text(store_uri)


def local_page(run_dir: Path, uri: str | None = None) -> str | None:
    """Return the URL of the experiment's runs that `mlflow ui` serves for a SQLite database; None for other stores."""
    if sqlite_file(tracking_uri(uri)) is None:
        return None
    destination = Destination.load(run_dir)
    experiment_id = None if destination is None else destination.experiment_id
    path = "" if experiment_id is None else f"/{experiment_id}/runs"
    return f"{_LOCAL_SERVER}/#/experiments{path}{_TRAINING}"


@dataclass(frozen=True, kw_only=True)
class Destination:
    """A run in a tracking store.

    Attributes:
        uri: URI of the store; credentials in it are used but never written to disk.
        run_id: id of the run; None until the store has created the run.
        experiment_id: id of the experiment; None until the store has created the run.
        key: unique key of the run in the store; finds a run that the store created but whose id was lost on the way.
        started_ms: start time of the run, in milliseconds since 1970.
        metric_names: `grouped`, or `flat` for a run that was begun with the names of metrics.jsonl.
    """

    uri: str
    experiment_name: str
    run_name: str
    run_id: str | None = None
    experiment_id: str | None = None
    key: str
    started_ms: int
    metric_names: str = GROUPED

    @classmethod
    def of(
        cls, run_dir: Path, *, uri: str, experiment_name: str, run_name: str, sweep_dir: Path | None = None
    ) -> "Destination":
        """Return the destination that an earlier start of this run recorded for the same store, else a new one.

        A new destination takes the style of metric names from that of undelivered records, else from that of the sweep;
        without either, names are grouped.

        Args:
            run_dir: the run directory.
            uri: URI of the store, with credentials.
            experiment_name: experiment of a new run.
            run_name: name of a new run.
            sweep_dir: directory of the sweep that the run belongs to; None if it does not belong to a sweep.
        """
        existing = cls.load(run_dir)
        if existing is not None and existing.uri == masked_text(uri):
            return replace(existing, uri=uri)
        sweep = None if sweep_dir is None else cls.load(sweep_dir)
        source = existing if (run_dir / MLFLOW_PENDING).exists() else sweep
        return cls(
            uri=uri,
            experiment_name=experiment_name,
            run_name=run_name,
            key=uuid.uuid4().hex,
            started_ms=time.time_ns() // 1_000_000,
            metric_names=GROUPED if source is None else source.metric_names,
        )

    @classmethod
    def load(cls, run_dir: Path) -> "Destination | None":
        """Read the destination from `mlflow.json` in the run directory; None if the file is missing or damaged."""
        try:
            optional: dict[str, Types] = dict.fromkeys(_IDS, (str, NoneType))
            content = read_object(run_dir / MLFLOW, required=_TYPES, optional={**optional, _STYLE: str})
        except (FileNotFoundError, DamagedFileError):
            return None
        run_id, experiment_id = (content.get(name) for name in _IDS)
        is_grouped = content.get(_STYLE) == GROUPED
        return cls(
            **{name: content[name] for name in _TYPES},
            run_id=run_id,
            experiment_id=experiment_id,
            metric_names=GROUPED if is_grouped else FLAT,
        )

    def save(self, run_dir: Path) -> None:
        """Write the destination to the run directory, without credentials."""
        public = asdict(self) | {"uri": masked_text(self.uri)}
        write_atomically(run_dir / MLFLOW, json.dumps(public, indent=2) + "\n")

    @property
    def is_grouped(self) -> bool:
        """True if metrics have grouped names."""
        return self.metric_names == GROUPED

    def evaluation_name(self, name: str) -> str:
        """Return the name of an evaluation's metric in this run."""
        return evaluation_name(name) if self.is_grouped else name

    @property
    def page(self) -> str | None:
        """URL of the run's page on a server; None without a server, or until the run is created."""
        scheme, _, address = self.uri.partition("://")
        if scheme not in ("http", "https") or None in (self.run_id, self.experiment_id):
            return None
        host = address.rpartition("@")[2].rstrip("/")  # without credentials; users of the page have their own
        return f"{scheme}://{host}/#/experiments/{self.experiment_id}/runs/{self.run_id}{_TRAINING}"

    @property
    def is_masked(self) -> bool:
        """True if the URI had credentials that were not written."""
        return MASK in self.uri
