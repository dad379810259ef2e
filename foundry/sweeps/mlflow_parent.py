"""Ending the run in MLflow that is above those of a sweep's jobs, with what came of the sweep."""

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
from foundry.sweeps.report import summary, write_files
from foundry.tracking.mlflow.destination import Destination, short_waits, tracking_uri
from foundry.tracking.mlflow.parent_link import ParentLink, join_settings, masked_values

_GOING = ("running", *WAITING)
_DESCRIPTION = "mlflow.note.content"
_log = logging.getLogger(__name__)


def close_parent(sweep_dir: Path, *, uri: str | None = None, stopped: bool = False) -> None:
    """End the sweep's run in MLflow, with what came of it, once no job is left that will run.

    Where there is no such run, nothing is done.

    Args:
        sweep_dir: the sweep's directory.
        uri: the store with its credentials, which the directory does not remember; None: MLFLOW_TRACKING_URI.
        stopped: the sweep was interrupted, so that those still queued will not run.

    Raises:
        Exception: what MLflow raises.
    """
    parent = Destination.load(sweep_dir)
    if parent is None or parent.run_id is None or (not stopped and _is_going(sweep_dir)):
        return
    if parent.uri != masked_text(tracking_uri(uri)):  # the directory may be somebody else's, and so the store
        _log.warning("the sweep's run in MLflow stays open: %s is not the store in use here", parent.uri)
        return
    from foundry.tracking.mlflow.store import MlflowStore

    parent = replace(parent, uri=tracking_uri(uri))
    sweep = read_sweep(sweep_dir, locks=False)
    status = "KILLED" if stopped else "FINISHED" if sweep.exit_code == 0 else "FAILED"
    tags = _outcome(sweep)
    store = MlflowStore(sweep_dir, parent)
    client, run_id = store.connect()
    known = client.get_run(run_id)
    if known.info.status == status and tags.items() <= known.data.tags.items():
        return  # the last job has done it
    for operation in _closing(sweep, parent.evaluation_name(sweep.metric), tags, status):
        store.apply([operation])


def try_to_close_parent(sweep_dir: Path, *, uri: str | None = None, stopped: bool = False) -> None:
    """The same; that a store does not answer, or not soon, is a line in the log and no more."""
    try:
        with short_waits():
            close_parent(sweep_dir, uri=uri, stopped=stopped)
    except Exception as error:
        _log.warning("the sweep's run in MLflow stays open: %s: %s", type(error).__name__, error)


def close_parent_of_job(run_dir: Path, *, uri: str | None = None) -> None:
    """The same after a job has ended, for the sweep that it belongs to; a sweep that a process runs is left to that."""
    link = ParentLink.load(run_dir)
    if link is not None and not is_held(run_dir / link.sweep):
        try_to_close_parent(run_dir / link.sweep, uri=uri)


def _is_going(sweep_dir: Path) -> bool:
    """Whether a job runs or will, as far as the jobs have said; one whose directory is gone does not."""
    folders = [job["dir"] for job in read_sweep_file(sweep_dir)["jobs"]]
    return any(read_status(sweep_dir / folder).get("state") in _GOING for folder in reversed(folders))


def _outcome(sweep: SweepReport) -> dict[str, str]:
    """Tags of a parent whose jobs have ended: how many are in which state, which is the best, and how to repeat it."""
    lines = [masked_text(text.plain) for text in summary(sweep)]
    tags = {
        "jobs": ", ".join(f"{number} {state}" for state, number in sweep.counts.items()),
        _DESCRIPTION: "  \n".join(f"`{line}`" for line in lines),  # Markdown: a line each, nothing in it is markup
    }
    if (best := sweep.best) is not None:
        swept = masked_values((key, best.values[key]) for key in sweep.names if key in best.values)
        tags |= {"best_job": str(best.index), "best_overrides": join_settings(swept)}
    return tags


def _closing(sweep: SweepReport, metric: str, tags: Mapping[str, str], status: str) -> Iterator[dict[str, Any]]:
    """What ends a parent; its metric is that of the best job, so that sweeps can be compared, too."""
    now = time.time_ns() // 1_000_000
    yield {"op": "tags", "values": tags}
    if (best := sweep.best) is not None and best.metric is not None:
        yield {"op": "metrics", "time_ms": now, "step": 0, "values": {metric: best.metric}}
    try:
        files = write_files(sweep)
    except Exception as error:  # the picture of a sweep is not worth a run that stays open
        _log.warning("the sweep's run in MLflow has no report: %s: %s", type(error).__name__, error)
        files = []
    for file in files:
        yield {"op": "artifact", "file": file.name, "to": ""}
    yield {"op": "end", "status": status, "time_ms": now}
