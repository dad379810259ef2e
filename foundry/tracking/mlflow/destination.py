"""Where in MLflow a run is kept, and the file in the run directory that remembers it."""

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
_LOCAL_SERVER = "http://127.0.0.1:5000"  # of `mlflow ui`
_TRAINING = "?workflowType=machine_learning"  # without it a new browser shows the pages for GenAI

# MLflow's own defaults wait 120 s and retry for minutes, greet on standard output and report usage over the network.
SHORT_WAITS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


def short_waits() -> AbstractContextManager[None]:
    """A context in which MLflow gives up soon and is quiet, where the user's environment does not say otherwise."""
    return default_variables(SHORT_WAITS)


def tracking_uri(uri: str | None = None) -> str:
    """The tracking URI: the given one, else MLFLOW_TRACKING_URI, else a database in the current directory.

    A database's path becomes absolute, so that it stays the same whatever the current directory.
    """
    chosen = uri or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI
    if database := sqlite_file(chosen):
        _, mark, query = chosen.partition("?")
        return f"{_SQLITE}{database}{mark}{query}"
    return chosen


def sqlite_file(uri: str) -> Path | None:
    """The absolute path of a sqlite database; None for any other URI."""
    path = uri.removeprefix(_SQLITE).partition("?")[0]
    return Path(path).absolute() if uri.startswith(_SQLITE) and path else None


def experiment(name: str) -> str:
    """The experiment's name: MLFLOW_EXPERIMENT_NAME stands in for the default, not for a chosen one."""
    return (os.environ.get("MLFLOW_EXPERIMENT_NAME") or name) if name == DEFAULT_EXPERIMENT else name


def sync_command(run_dir: Path, uri: str) -> str:
    """The command that sends to a store what it missed; a store that the environment does not name is named in it."""
    command = ["python", "-m", "foundry.sync", f"dir={run_dir.absolute()}"]
    if uri == tracking_uri():
        return shlex.join(command)
    if (shown := masked_text(uri)) != uri:  # its credentials should not be in a shell's history
        return f"MLFLOW_TRACKING_URI={shown} {shlex.join(command)}"
    return shlex.join([*command, f"uri={uri}"])


def how_to_look(run_dir: Path, uri: str | None = None) -> str:
    """What shows a run in MLflow: its page, or the command that starts a server for a database, from any folder.

    Args:
        run_dir: the run directory.
        uri: that the run was given; None: MLFLOW_TRACKING_URI, else the default.
    """
    chosen = tracking_uri(uri)
    if sqlite_file(chosen) is not None:
        return shlex.join(["mlflow", "ui", "--backend-store-uri", masked_text(chosen)])
    destination = Destination.load(run_dir)
    return (None if destination is None else destination.page) or masked_text(chosen)


def local_page(run_dir: Path, uri: str | None = None) -> str | None:
    """The page with the experiment's runs that `mlflow ui` shows of a database; None if the runs are on a server."""
    if sqlite_file(tracking_uri(uri)) is None:
        return None
    destination = Destination.load(run_dir)
    experiment_id = None if destination is None else destination.experiment_id
    place = "" if experiment_id is None else f"/{experiment_id}/runs"
    return f"{_LOCAL_SERVER}/#/experiments{place}{_TRAINING}"


@dataclass(frozen=True, kw_only=True)
class Destination:
    """One run in one tracking store.

    Attributes:
        uri: the store; credentials in it are used and never written.
        run_id: None until the store has made the run.
        experiment_id: None until the store has made the run.
        key: tells this run from others in the store when a request was carried out and its answer was lost.
        started_ms: when the run began, in milliseconds since 1970.
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
        """The destination of an earlier start of this run in the same store, else a new one.

        A new one has the metric names of its sweep, or of records that wait to be sent, if there are any.

        Args:
            run_dir: the run directory.
            uri: the store, with credentials.
            experiment_name: of a new run.
            run_name: of a new run.
            sweep_dir: directory of the sweep whose job the run is; None if it is of none.
        """
        earlier = cls.load(run_dir)
        if earlier is not None and earlier.uri == masked_text(uri):
            return replace(earlier, uri=uri)
        sweep = None if sweep_dir is None else cls.load(sweep_dir)
        kept = earlier if (run_dir / MLFLOW_PENDING).exists() else sweep
        return cls(
            uri=uri,
            experiment_name=experiment_name,
            run_name=run_name,
            key=uuid.uuid4().hex,
            started_ms=time.time_ns() // 1_000_000,
            metric_names=GROUPED if kept is None else kept.metric_names,
        )

    @classmethod
    def load(cls, run_dir: Path) -> "Destination | None":
        """What the run directory remembers; None where that is nothing."""
        try:
            optional: dict[str, Types] = dict.fromkeys(_IDS, (str, NoneType))
            content = read_object(run_dir / MLFLOW, needed=_TYPES, optional={**optional, _STYLE: str})
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
        """Remember it in the run directory, without credentials."""
        public = asdict(self) | {"uri": masked_text(self.uri)}
        write_atomically(run_dir / MLFLOW, json.dumps(public, indent=2) + "\n")

    @property
    def is_grouped(self) -> bool:
        """Whether metrics have names in groups."""
        return self.metric_names == GROUPED

    def evaluation_name(self, name: str) -> str:
        """The name of an evaluation's metric in this run."""
        return evaluation_name(name) if self.is_grouped else name

    @property
    def page(self) -> str | None:
        """The run's page, where a server shows it; None where there is none, or the run is not made yet."""
        scheme, _, place = self.uri.partition("://")
        if scheme not in ("http", "https") or None in (self.run_id, self.experiment_id):
            return None
        host = place.rpartition("@")[2].rstrip("/")  # whoever opens it has credentials of their own
        return f"{scheme}://{host}/#/experiments/{self.experiment_id}/runs/{self.run_id}{_TRAINING}"

    @property
    def is_masked(self) -> bool:
        """Whether the URI had credentials that were not written."""
        return MASK in self.uri
