"""Completion of a sweep's parent run in MLflow, with the results of the sweep."""

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from foundry.run_dir.lock import is_held
from foundry.run_dir.redact import masked_text
from foundry.run_dir.status import WAITING, read_status
from foundry.run_dir.sweep_file import read_sweep_file
from foundry.sweeps.reading import SweepReport, read_sweep
from foundry.sweeps.report import summary
from foundry.sweeps.report_files import write_files
from foundry.tracking.mlflow.destination import Destination, short_waits, tracking_uri
from foundry.tracking.mlflow.parent_link import ParentLink, join_settings, masked_values

_ACTIVE_STATES = ("running", *WAITING)
_DESCRIPTION = "mlflow.note.content"
_log = logging.getLogger(__name__)


def close_parent(sweep_dir: Path, *, uri: str | None = None, stopped: bool = False) -> None:
    """Log the results of a sweep to its run in MLflow and end that run, if `stopped` or no job is running or queued.

    Does nothing if the sweep has no run in MLflow, or has it in another store.

    Args:
        sweep_dir: the sweep's directory.
        uri: tracking URI including credentials, which the directory does not store; None for MLFLOW_TRACKING_URI or,
            without this variable, the default store.
        stopped: whether the sweep was interrupted, so that queued jobs will not run.

    Raises:
        Exception: any error of MLflow.
    """
    parent = Destination.load(sweep_dir)
    if parent is None or parent.run_id is None or (not stopped and _has_active_jobs(sweep_dir)):
        return
    if parent.uri != masked_text(tracking_uri(uri)):  # the directory may come from another user with another store
        _log.warning("the sweep's run in MLflow stays open: %s is not the store in use here", parent.uri)
        return
    from foundry.tracking.mlflow.store import MlflowStore

    parent = replace(parent, uri=tracking_uri(uri))
    sweep = read_sweep(sweep_dir, locks=False)
    status = "KILLED" if stopped else "FINISHED" if sweep.exit_code == 0 else "FAILED"
    tags = _outcome(sweep)
    store = MlflowStore(sweep_dir, parent)
    client, run_id = store.connect()
    run = client.get_run(run_id)
    if run.info.status == status and tags.items() <= run.data.tags.items():
        return  # already done by the last job's process
    for operation in _end_operations(sweep, parent.evaluation_name(sweep.metric), tags, status):
        store.apply([operation])


def try_to_close_parent(sweep_dir: Path, *, uri: str | None = None, stopped: bool = False) -> None:
    """Call `close_parent` with short timeouts, and only log an error, such as a store that does not respond."""
    try:
        with short_waits():
            close_parent(sweep_dir, uri=uri, stopped=stopped)
    except Exception as error:
        _log.warning("the sweep's run in MLflow stays open: %s: %s", type(error).__name__, error)


def close_parent_of_job(run_dir: Path, *, uri: str | None = None) -> None:
    """End the MLflow run of the sweep of an ended job, unless the sweep's process is alive or other jobs are left."""
    link = ParentLink.load(run_dir)
    if link is not None and not is_held(run_dir / link.sweep):
        try_to_close_parent(run_dir / link.sweep, uri=uri)


def _has_active_jobs(sweep_dir: Path) -> bool:
    """Return whether a job is running or queued, according to the status files."""
    folders = [job["dir"] for job in read_sweep_file(sweep_dir)["jobs"]]
    return any(read_status(sweep_dir / folder).get("state") in _ACTIVE_STATES for folder in reversed(folders))


def _outcome(sweep: SweepReport) -> dict[str, str]:
    """Return the tags of a completed parent run: numbers of jobs by state, the best job, and how to repeat that job."""
    lines = [masked_text(text.plain) for text in summary(sweep)]
    tags = {
        "jobs": ", ".join(f"{number} {state}" for state, number in sweep.counts.items()),
        _DESCRIPTION: "  \n".join(f"`{line}`" for line in lines),  # Markdown: line breaks, no markup
    }
    if (best := sweep.best) is not None:
        swept = masked_values((key, best.values[key]) for key in sweep.names if key in best.values)
        tags |= {"best_job": str(best.index), "best_overrides": join_settings(swept)}
    return tags


def _end_operations(sweep: SweepReport, metric: str, tags: Mapping[str, str], status: str) -> Iterator[dict[str, Any]]:
    """Yield the operations that end a parent run; it gets the metric of the best job, to compare sweeps by."""
    now = time.time_ns() // 1_000_000
    yield {"op": "tags", "values": tags}
    if (best := sweep.best) is not None and best.metric is not None:
        yield {"op": "metrics", "time_ms": now, "step": 0, "values": {metric: best.metric}}
    try:
        files = write_files(sweep)
    except Exception as error:  # a failed plot must not keep the run open
        _log.warning("the sweep's run in MLflow has no report: %s: %s", type(error).__name__, error)
        files = []
    for file in files:
        yield {"op": "artifact", "file": file.name, "to": ""}
    yield {"op": "end", "status": status, "time_ms": now}
