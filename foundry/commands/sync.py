"""`foundry sync dir=RUN_DIR`: send records to MLflow that could not be delivered during the run."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlparse

from foundry.config.command import answer_help, facts_alone, help_text, print_facts, take_json
from foundry.config.composition.start_dir import check_start_dir
from foundry.config.setting import setting
from foundry.core.errors import ConfigError
from foundry.core.exit_codes import ExitCode
from foundry.run_dir.files import UnsafeFileError
from foundry.run_dir.names import MLFLOW, MLFLOW_PENDING
from foundry.run_dir.redact import masked_text, one_line
from foundry.sweeps.mlflow_parent import close_parent_of_job
from foundry.tracking.mlflow.destination import (
    Destination,
    short_waits,
    sqlite_file,
    sync_command,
    tracking_uri,
)
from foundry.tracking.mlflow.queue import read_pending, send_file, write_pending
from foundry.tracking.mlflow.store import MlflowStore, resolve_file


@dataclass(frozen=True, kw_only=True)
class SyncOptions:
    """Options of the command."""

    dir: str = setting("???", "run directory")
    uri: str | None = setting(None, "tracking URI; null: the run's, if it is MLFLOW_TRACKING_URI or the default")


def send_pending(run_dir: Path, uri: str | None = None) -> int:
    """Send the records that a run could not deliver, and delete the file that holds the records.

    Args:
        run_dir: run directory, possibly from an untrusted source: it does not decide where its records are sent, or
            which files outside of it are sent with them.
        uri: tracking URI; None uses the URI of the run if that is MLFLOW_TRACKING_URI or the default.

    Returns:
        The number of records sent; 0 if none were pending.

    Raises:
        ValueError: the directory does not name the run in MLflow or names a store that the user did not select, or its
            records are invalid or refer to files outside of the directory.
        OSError: a file cannot be read.
        Exception: raised by MLflow; the records are then kept.
    """
    pending_file = run_dir / MLFLOW_PENDING
    if not os.path.lexists(pending_file):
        return 0
    destination = Destination.load(run_dir)
    if destination is None:
        raise ValueError(f"dir={run_dir} has no readable {MLFLOW}, so the run in MLflow is unknown")
    destination = replace(destination, uri=_resolve_uri(destination, uri))
    for operation in read_pending(pending_file):
        if operation["op"] == "artifact":
            with suppress(FileNotFoundError):
                resolve_file(run_dir, operation)
    store = MlflowStore(run_dir, destination)
    with short_waits():
        if uri is None and "MLFLOW_TRACKING_URI" not in os.environ:
            _check_artifacts(store, destination)
        num_sent = send_file(store, pending_file)
    pending_file.unlink()
    close_parent_of_job(run_dir, uri=destination.uri)
    return num_sent


def send_metrics(run_dir: Path, values: Mapping[str, float], *, step: int, uri: str | None = None) -> str | None:
    """Add metrics measured after a run to the run in MLflow; if MLflow fails, keep them as pending records.

    Args:
        run_dir: run directory; see `send_pending`.
        values: metrics by name.
        step: step of the evaluated checkpoint.
        uri: see `send_pending`.

    Returns:
        A one-line message for the user; None if the run is not in MLflow.
    """
    destination = Destination.load(run_dir)
    if destination is None:
        return None
    try:
        destination = replace(destination, uri=_resolve_uri(destination, uri))
    except ValueError as error:
        return f"MLflow: not sent: {one_line(str(error))}"
    operation = {"op": "metrics", "time_ms": time.time_ns() // 1_000_000, "step": step, "values": dict(values)}
    try:
        with short_waits():
            MlflowStore(run_dir, destination).apply([operation])
        close_parent_of_job(run_dir, uri=destination.uri)
    except Exception as error:
        write_pending(run_dir / MLFLOW_PENDING, [operation])
        reason = f"{type(error).__name__}: {one_line(str(error))[:300]}"
        return f"MLflow: not sent ({reason}); send it with: {sync_command(run_dir, destination.uri)}"
    return f"MLflow: added to run {destination.run_id}"


def _resolve_uri(destination: Destination, uri: str | None) -> str:
    """Return the tracking URI selected by the user; a file of the run directory must not select it.

    Raises:
        ValueError: the run used another URI.
    """
    if uri is not None:
        return tracking_uri(uri)
    user_uri = tracking_uri()
    if masked_text(user_uri) == destination.uri:
        return user_uri
    if destination.is_masked:
        raise ValueError(
            f"the credentials of {destination.uri} are not stored; set MLFLOW_TRACKING_URI or give uri=URI"
        )
    raise ValueError(
        f"{MLFLOW} names {destination.uri}, which is not {masked_text(user_uri)}; if that is correct, add "
        f"uri={destination.uri}"
    )


def _check_artifacts(store: MlflowStore, destination: Destination) -> None:
    """Refuse an SQLite database whose artifacts are outside of its folder: it may have come with the run directory.

    Raises:
        ValueError: the artifacts are outside the folder of the database.
    """
    client, run_id = store.connect()
    location = urlparse(client.get_run(run_id).info.artifact_uri)
    database = sqlite_file(destination.uri)
    folder = Path(unquote(location.path))
    if database is not None and (
        location.scheme not in ("", "file") or not folder.resolve().is_relative_to(database.parent.resolve())
    ):
        raise ValueError(f"{destination.uri} stores artifacts at {location.geturl()}; if that is correct, add uri=URI")


def run(arguments: Sequence[str]) -> int:
    """Run the command; return 0 if nothing is pending any more, 1 if MLflow failed, 2 for invalid input."""
    arguments, as_json = take_json(arguments)
    if answer_help(arguments, lambda: help_text(SyncOptions, "foundry.sync", "send pending records to MLflow.")):
        return ExitCode.SUCCESS
    try:
        check_start_dir()
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.REFUSED
    values = dict(argument.partition("=")[::2] for argument in arguments)
    run_dir = Path(values.get("dir", "").replace("\0", ""))
    if not values.get("dir") or not values.keys() <= {"dir", "uri"} or not run_dir.is_dir():
        text = one_line(" ".join(arguments)) or "no arguments"
        sys.stderr.write(f"{text}: not an existing run directory; write foundry sync dir=RUN_DIR [uri=URI]\n")
        return ExitCode.REFUSED
    try:
        with facts_alone() if as_json else nullcontext():
            num_sent = send_pending(run_dir, values.get("uri") or None)
    except (ValueError, UnsafeFileError, PermissionError) as error:
        sys.stderr.write(f"nothing was sent: {one_line(str(error))}\n")
        return ExitCode.REFUSED
    except Exception as error:
        sys.stderr.write(f"not sent, all records are kept: {type(error).__name__}: {one_line(str(error))[:300]}\n")
        return ExitCode.FAILED
    if as_json:
        print_facts({"sent": num_sent})
    else:
        sys.stdout.write(f"{num_sent} records sent\n")
    return ExitCode.SUCCESS


def main() -> None:
    """Entry point of the command."""
    sys.exit(run(sys.argv[1:]))
