"""Execution of operations on a run in MLflow. All operations are idempotent."""

import fcntl
import glob
import itertools
import json
import logging
import os
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundry.run_dir.checkpoints import NAME
from foundry.run_dir.files import inside, open_regular
from foundry.run_dir.redact import masked_text, one_line
from foundry.tracking.mlflow.destination import DEFAULT_EXPERIMENT, Destination, experiment, sqlite_file
from foundry.tracking.mlflow.parent_link import ParentLink, origin_tags

if TYPE_CHECKING:
    from mlflow import MlflowClient

_log = logging.getLogger(__name__)

Operation = dict[str, Any]
"""Operation as plain JSON values.

`op` is its kind: start, params, tags, metrics, data, text, artifact, model or end.
"""

OPERATIONS: dict[str, dict[str, type]] = {
    "start": {},
    "params": {"values": dict},
    "tags": {"values": dict},
    "metrics": {"values": dict, "time_ms": int, "step": int},
    "data": {"name": str, "digest": str, "source": str, "profile": dict},
    "text": {"file": str, "text": str},
    "artifact": {"file": str, "to": str},
    "model": {"checkpoint": str},
    "end": {"status": str, "time_ms": int},
}
"""Fields of each operation, with their types."""

METRICS_PER_REQUEST = 1000
_PARAMS_PER_REQUEST = 100
_PARAM_LENGTH, _TAG_LENGTH, _KEY_LENGTH = 6000, 8000, 250
_LOCK = ".mlflow.lock"
_TRUNCATED = " … [truncated]"
_KEY_TAG, _RUN_DIR_TAG, _PARENT_TAG = "foundry_key", "run_dir", "mlflow.parentRunId"
_EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}  # MLflow shows training, not "GenAI", pages
_REFUSALS = frozenset({"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST", "INVALID_STATE"})


def is_refusal(error: Exception) -> bool:
    """Return True if the store rejected the request as invalid, so that a retry is useless."""
    return getattr(error, "error_code", None) in _REFUSALS


def resolve_file(run_dir: Path, operation: Operation) -> Path:
    """Return the file of an artifact operation, after checking that it lies in the run directory.

    Raises:
        FileNotFoundError: if the file no longer exists.
        UnsafeFileError: if it is not a regular file.
        ValueError: if its path, or its target path in MLflow, leads out of the run directory.
    """
    inside(run_dir, operation["to"])
    path = inside(run_dir, operation["file"])
    with open_regular(path, "rb"):
        return path


class MlflowStore:
    """A run in an MLflow store; connects at the first operation.

    Args:
        run_dir: folder of the artifacts and of `mlflow.json`.
        destination: the run, created if it does not exist yet.
        trust: allow parts of the run that are not built in, as the run itself did.
    """

    def __init__(self, run_dir: Path, destination: Destination, *, trust: bool = False) -> None:
        self._run_dir, self._trust = run_dir, trust
        self._destination = destination
        self._link = ParentLink.load(run_dir)
        self._client: MlflowClient | None = None

    def connect(self) -> "tuple[MlflowClient, str]":
        """Return the client and the run's id. The first successful call finds or creates the run."""
        if self._client is None:
            client = _quiet_client(self._destination.uri)
            tags = self._job_tags()
            if not _exists(client, self._destination.run_id):
                run_id = _find_or_create(client, self._destination, self._run_dir, tags)
                experiment_id = str(client.get_run(run_id).info.experiment_id)
                self._destination = replace(self._destination, run_id=run_id, experiment_id=experiment_id)
                self._destination.save(self._run_dir)
            self._client = client
        assert self._destination.run_id is not None
        return self._client, self._destination.run_id

    def apply(self, operations: Sequence[Operation]) -> None:
        """Execute one operation, or several metrics operations in one batch."""
        client, run_id = self.connect()
        first = operations[0]
        match first["op"]:
            case "metrics":
                _log_metrics(client, run_id, operations)
            case "params":
                _log_params(client, run_id, first["values"])
            case "tags":
                _set_tags(client, run_id, first["values"])
            case "data":
                _log_data(client, run_id, first)
            case "text":
                client.log_text(run_id, first["text"], first["file"])
            case "artifact":
                self._log_artifact(client, run_id, first)
            case "model":
                self._log_model(client, run_id, first["checkpoint"])
            case "start":
                client.update_run(run_id, status="RUNNING")
            case "end":
                client.set_terminated(run_id, status=first["status"], end_time=first["time_ms"])

    def _log_artifact(self, client: "MlflowClient", run_id: str, operation: Operation) -> None:
        try:
            path = resolve_file(self._run_dir, operation)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            _log.warning("MLflow: not sent: %s", error)
            return
        client.log_artifact(run_id, str(path), operation["to"] or None)

    def _log_model(self, client: "MlflowClient", run_id: str, checkpoint: str) -> None:
        from foundry.tracking.mlflow.logged_model import log_model

        if NAME.fullmatch(checkpoint) is None:
            _log.warning("MLflow: %s is not a checkpoint", one_line(checkpoint))
            return
        log_model(client, run_id, self._run_dir, checkpoint, trust=self._trust)

    def _job_tags(self) -> dict[str, str]:
        """Return the tags that link a job to its sweep.

        Creates the sweep's parent run, or sets it to running, if needed.
        """
        if self._link is None:
            return {}
        parent = parent_id((self._run_dir / self._link.sweep).resolve(), self._destination)
        return self._link.tags(self._run_dir) | ({} if parent is None else {_PARENT_TAG: parent})


def parent_id(sweep_dir: Path, child: Destination) -> str | None:
    """Return the id of a sweep's parent run, after creating the run if necessary and setting its status to running.

    Args:
        sweep_dir: directory of the sweep.
        child: destination of the job's run.

    Returns:
        The id; None if the sweep's run is in another store.
    """
    with open_regular(sweep_dir / _LOCK, "a") as lock:
        with suppress(OSError):  # file system without locks: two first jobs may create two parents
            fcntl.flock(lock, fcntl.LOCK_EX)  # unlike lockf, also excludes threads of one process
        existing = Destination.load(sweep_dir)
        if existing is not None and existing.uri != masked_text(child.uri):
            return None
        name = sweep_dir.name
        parent = Destination.of(sweep_dir, uri=child.uri, experiment_name=child.experiment_name, run_name=name)
        if existing is None:
            parent = replace(parent, metric_names=child.metric_names)
        parent.save(sweep_dir)
        store = MlflowStore(sweep_dir, parent)
        if existing is None or existing.run_id is None:
            store.apply([{"op": "tags", "values": origin_tags(sweep_dir)}])
        store.apply([{"op": "start"}])
        return store.connect()[1]


def _quiet_client(uri: str) -> "MlflowClient":
    from mlflow import MlflowClient

    if os.environ.get("MLFLOW_LOGGING_LEVEL", "WARNING") == "WARNING":
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
    database = sqlite_file(uri)
    with _lock_database(database):
        if database is None:
            return MlflowClient(tracking_uri=uri)
        if not database.exists() or not database.stat().st_size:
            _create_database(database)
        try:
            return MlflowClient(tracking_uri=uri)
        except Exception as error:
            if _holds_runs(database):
                raise
            raise IncompleteDatabaseError(database) from error


class IncompleteDatabaseError(RuntimeError):
    """Raised for a database whose creation was killed in mid-migration. MLflow cannot recover from this."""

    def __init__(self, database: Path) -> None:
        super().__init__(f"{database} is incomplete: its creation was interrupted; it contains no runs; delete it")


def _create_database(database: Path) -> None:
    """Create a database with all of MLflow's tables under a temporary name, then rename it.

    The database is therefore complete whenever it exists.
    """
    from mlflow import MlflowClient
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    for leftover in database.parent.glob(f".{glob.escape(database.name)}.*.partial*"):  # left by killed processes
        leftover.unlink(missing_ok=True)
    partial = database.with_name(f".{database.name}.{os.getpid()}.partial")
    uri = f"sqlite:///{partial}"
    MlflowClient(tracking_uri=uri)
    # Closing the last connection removes SQLite's journal.
    SqlAlchemyStore._engine_map.pop(uri).dispose()
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    if database.exists() and not database.stat().st_size:
        database.unlink()
    with suppress(FileExistsError):  # created by another machine, which locks do not reach
        os.link(partial, database)
    partial.unlink()


def _holds_runs(database: Path) -> bool:
    """Return True if a database contains a run, which shows that it was complete."""
    with closing(sqlite3.connect(database)) as connection:
        try:
            return connection.execute("SELECT 1 FROM runs LIMIT 1").fetchone() is not None
        except sqlite3.OperationalError:  # the table does not exist
            return False


@contextmanager
def _lock_database(database: Path | None) -> Iterator[None]:
    """Prevent other processes from opening a database at the same time, since the first one creates its tables.

    MLflow does not lock the database: if two processes create tables at once, one fails.
    """
    with ExitStack() as stack:
        if database is not None:
            with suppress(OSError):  # file system without locks, or missing folder, reported later
                folder = os.open(database.parent, os.O_RDONLY)
                stack.callback(os.close, folder)
                fcntl.flock(folder, fcntl.LOCK_EX)
        yield


def _exists(client: "MlflowClient", run_id: str | None) -> bool:
    """Return True if the store still has a recorded run, which is not so if its database was replaced."""
    from mlflow.exceptions import MlflowException

    if run_id is None:
        return False
    try:
        return bool(client.get_run(run_id).info.lifecycle_stage == "active")
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
    _log.warning("MLflow no longer has run %s; creating a new one", run_id)
    return False


def _find_or_create(
    client: "MlflowClient", destination: Destination, run_dir: Path, more_tags: Mapping[str, str]
) -> str:
    """Find or create the run and return its id.

    MLFLOW_RUN_ID names the run to write to. If another run directory already writes to that run, for example because
    the variable is set for a whole sweep, a new run becomes its child.
    """
    tags = {_KEY_TAG: destination.key, _RUN_DIR_TAG: str(run_dir.absolute()), **more_tags}
    experiment_id = None
    if run_id := os.environ.get("MLFLOW_RUN_ID"):
        run = client.get_run(run_id)
        if run.data.tags.get(_RUN_DIR_TAG, tags[_RUN_DIR_TAG]) == tags[_RUN_DIR_TAG]:
            _set_tags(client, run_id, tags)
            return run_id
        tags[_PARENT_TAG] = run_id
        experiment_id = run.info.experiment_id
    experiment_id = experiment_id or _experiment_id(client, destination)
    runs = client.search_runs([experiment_id], f"tags.{_KEY_TAG} = '{destination.key}'", max_results=1)
    if runs:
        return str(runs[0].info.run_id)
    run = client.create_run(experiment_id, start_time=destination.started_ms, tags=tags, run_name=destination.run_name)
    return str(run.info.run_id)


def _experiment_id(client: "MlflowClient", destination: Destination) -> str:
    from mlflow.exceptions import MlflowException

    name = experiment(destination.experiment_name)
    experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID")
    if experiment_id and name == DEFAULT_EXPERIMENT:
        return experiment_id
    existing = client.get_experiment_by_name(name)
    if existing is None:
        try:
            location = _artifact_location(destination.uri, name)
            return str(client.create_experiment(name, artifact_location=location, tags=_EXPERIMENT_TAGS))
        except MlflowException as error:  # another job of a sweep was faster
            existing = client.get_experiment_by_name(name)
            if existing is None:
                raise error
    return str(existing.experiment_id)


def _artifact_location(uri: str, experiment_name: str) -> str | None:
    """Return the artifact folder next to a SQLite database; None to let a server choose it."""
    database = sqlite_file(uri)
    if database is None:
        return None
    return (database.parent / "mlruns" / re.sub(r"[^\w.-]", "_", experiment_name)).as_uri()


def _log_metrics(client: "MlflowClient", run_id: str, operations: Iterable[Operation]) -> None:
    from mlflow.entities import Metric

    points = [
        Metric(_key(name), float(value), operation["time_ms"], operation["step"])
        for operation in operations
        for name, value in operation["values"].items()
    ]
    for batch in _batches(points, METRICS_PER_REQUEST):
        client.log_batch(run_id, metrics=batch)


def _log_params(client: "MlflowClient", run_id: str, values: dict[str, str]) -> None:
    """Log parameters. MLflow's parameters cannot change, so values that a resumed run changed become tags."""
    from mlflow.entities import Param

    logged = client.get_run(run_id).data.params
    texts = {_key(name): _truncate(value, _PARAM_LENGTH) for name, value in values.items()}
    params = [Param(name, value) for name, value in texts.items() if name not in logged]
    for batch in _batches(params, _PARAMS_PER_REQUEST):
        client.log_batch(run_id, params=batch)
    _set_tags(client, run_id, {f"changed.{n}": v for n, v in texts.items() if n in logged and logged[n] != v})


def _log_data(client: "MlflowClient", run_id: str, operation: Operation) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    dataset = Dataset(
        name=operation["name"],
        digest=operation["digest"],
        source_type="local" if operation["source"] else "code",
        source=json.dumps({"uri": operation["source"]}),
        profile=json.dumps(operation["profile"]),
    )
    client.log_inputs(run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])])


def _set_tags(client: "MlflowClient", run_id: str, values: dict[str, str]) -> None:
    from mlflow.entities import RunTag

    tags = [RunTag(_key(name), _truncate(value, _TAG_LENGTH)) for name, value in values.items()]
    for batch in _batches(tags, _PARAMS_PER_REQUEST):
        client.log_batch(run_id, tags=batch)


def _batches(items: Sequence[Any], size: int) -> Iterable[list[Any]]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


def _truncate(value: str, length: int) -> str:
    return value if len(value) <= length else value[: length - len(_TRUNCATED)] + _TRUNCATED


def _key(name: str) -> str:
    return re.sub(r"[^\w\-. /:]", "_", name)[:_KEY_LENGTH]
