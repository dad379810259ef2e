"""One run in MLflow above those of a sweep's jobs.

The sweep writes `mlflow_parent.json` into each job's run directory. The first job that reaches the store makes the
parent, and the sweep's directory remembers it as a run directory remembers its run. So starting a sweep waits for no
server, a job that is queued again or sent later finds the same parent, and a sweep that logs nowhere has none.
"""

import fcntl
import json
import logging
import os
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from foundry.run_dir.files import inside, open_regular, write_atomically
from foundry.run_dir.redact import masked, masked_text
from foundry.run_dir.status import read_status
from foundry.run_dir.strict_json import DamagedFileError, read_object
from foundry.sweeps.job_overrides import brief, format_command, key_and_value, recorded_words, short_names
from foundry.sweeps.reading import SWEEP, read_sweep
from foundry.sweeps.report_files import write_files
from foundry.sweeps.results import WAITING, Sweep
from foundry.sweeps.table import summary
from foundry.tracking.mlflow.destination import Destination, short_waits, tracking_uri
from foundry.tracking.provenance import provenance

FILE_NAME = "mlflow_parent.json"
_LOCK = ".mlflow.lock"
_GOING = ("running", *WAITING)
_DESCRIPTION = "mlflow.note.content"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ParentLink:
    """What a job knows of its sweep.

    Attributes:
        sweep: the sweep's directory, relative to the job's run directory.
        job: its number.
        swept: what it has otherwise than other jobs, by key; secrets are masked.
    """

    sweep: str
    job: int
    swept: Mapping[str, str]

    @classmethod
    def write(cls, run_dir: Path, sweep_dir: Path, job: int, overrides: Sequence[str]) -> None:
        """Tell a job of its sweep, before it starts."""
        swept = _masked_values(map(key_and_value, overrides))
        link = cls(sweep=os.path.relpath(sweep_dir, run_dir), job=job, swept=swept)
        write_atomically(run_dir / FILE_NAME, json.dumps(asdict(link), indent=2) + "\n")

    @classmethod
    def load(cls, run_dir: Path) -> "ParentLink | None":
        """The link of a job; None for a run that is of no sweep, or was copied out of one."""
        try:
            content = read_object(run_dir / FILE_NAME, needed={"sweep": str, "job": int, "swept": dict})
        except (FileNotFoundError, DamagedFileError):
            return None
        swept = {str(key): str(value) for key, value in content["swept"].items()}
        link = cls(sweep=content["sweep"], job=content["job"], swept=swept)
        sweep_dir = (run_dir / link.sweep).resolve()
        is_above = run_dir.resolve().is_relative_to(sweep_dir) and run_dir.resolve() != sweep_dir
        return link if is_above and (sweep_dir / SWEEP).is_file() else None

    @property
    def run_name(self) -> str:
        """`3: lr=0.001 seed=1`, by which a person tells the jobs of a sweep apart."""
        names = short_names(list(self.swept))
        settings = " ".join(f"{names[key]}={brief(value)}" for key, value in self.swept.items())
        return f"{self.job}: {settings}" if settings else str(self.job)

    def tags(self, run_dir: Path) -> dict[str, str]:
        """Of the job's run: which job of which sweep it is, and the command that runs it by itself."""
        sweep_dir = os.path.normpath(run_dir.absolute() / self.sweep)
        command = format_command(recorded_words(run_dir), _facts(Path(sweep_dir)).get("command", ()))
        return {
            "sweep_dir": sweep_dir,
            "sweep_job": str(self.job),
            "overrides": _words(self.swept),
            "command": masked_text(command),
        }

    def parent_id(self, run_dir: Path, child: Destination) -> str | None:
        """The id of the parent, which the first job to ask makes, and which is running again if it had ended.

        Args:
            run_dir: the job's.
            child: where the job's run is kept.

        Returns:
            None where the parent is in another store.
        """
        from foundry.tracking.mlflow.store import MlflowStore

        sweep_dir = (run_dir / self.sweep).resolve()
        with open_regular(sweep_dir / _LOCK, "a") as lock:
            with suppress(OSError):  # a file system without locks: two first jobs may then make two parents
                fcntl.flock(lock, fcntl.LOCK_EX)  # unlike lockf it keeps threads of one process apart, too
            earlier = Destination.load(sweep_dir)
            if earlier is not None and earlier.uri != masked_text(child.uri):
                return None
            name = sweep_dir.name
            parent = Destination.of(sweep_dir, uri=child.uri, experiment_name=child.experiment_name, run_name=name)
            parent.save(sweep_dir)
            store = MlflowStore(sweep_dir, parent)
            if earlier is None or earlier.run_id is None:
                store.apply([{"op": "tags", "values": _origin(sweep_dir)}])
            store.apply([{"op": "start"}])
            return store.connect()[1]


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
    for operation in _closing(sweep, tags, status):
        store.apply([operation])


def try_to_close_parent(sweep_dir: Path, *, uri: str | None = None, stopped: bool = False) -> None:
    """The same; that a store does not answer, or not soon, is a line in the log and no more."""
    try:
        with short_waits():
            close_parent(sweep_dir, uri=uri, stopped=stopped)
    except Exception as error:
        _log.warning("the sweep's run in MLflow stays open: %s: %s", type(error).__name__, error)


def _facts(sweep_dir: Path) -> dict[str, Any]:
    facts = read_object(sweep_dir / SWEEP, needed={"jobs": list}, optional={"command": list})
    return facts | {"command": [str(word) for word in facts.get("command", ())]}


def _is_going(sweep_dir: Path) -> bool:
    """Whether a job runs or will, as far as the jobs have said; one whose directory is gone does not."""
    folders = [job["dir"] for job in _facts(sweep_dir)["jobs"]]
    return any(read_status(inside(sweep_dir, folder)).get("state") in _GOING for folder in reversed(folders))


def _origin(sweep_dir: Path) -> dict[str, str]:
    """Tags of a new parent: who started the sweep, how, and of what code."""
    facts = _facts(sweep_dir)
    tags = provenance(Path.cwd())
    del tags["host"]  # of the first job only
    tags |= {name: str(facts[name]) for name in ("launcher", "metric", "direction") if name in facts}
    command = shlex.join(["python", "-m", "foundry", *facts.get("command", ())])
    return tags | {"command": masked_text(command)}


def _outcome(sweep: Sweep) -> dict[str, str]:
    """Tags of a parent whose jobs have ended: how many are in which state, which is the best, and how to repeat it."""
    lines = [masked_text(text.plain) for text in summary(sweep)]
    tags = {
        "jobs": ", ".join(f"{number} {state}" for state, number in sweep.counts.items()),
        _DESCRIPTION: "  \n".join(f"`{line}`" for line in lines),  # Markdown: a line each, nothing in it is markup
    }
    if (best := sweep.best) is not None:
        swept = _masked_values((key, best.values[key]) for key in sweep.names if key in best.values)
        tags |= {"best_job": str(best.index), "best_overrides": _words(swept)}
    return tags


def _masked_values(settings: Iterable[tuple[str, str]]) -> dict[str, str]:
    return {key: str(masked(value, key)) for key, value in settings}


def _words(settings: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items())


def _closing(sweep: Sweep, tags: Mapping[str, str], status: str) -> Iterator[dict[str, Any]]:
    """What ends a parent; its metric is that of the best job, so that sweeps can be compared, too."""
    now = time.time_ns() // 1_000_000
    yield {"op": "tags", "values": tags}
    if (best := sweep.best) is not None and best.metric is not None:
        yield {"op": "metrics", "time_ms": now, "step": 0, "values": {sweep.metric: best.metric}}
    try:
        files = write_files(sweep)
    except Exception as error:  # the picture of a sweep is not worth a run that stays open
        _log.warning("the sweep's run in MLflow has no report: %s: %s", type(error).__name__, error)
        files = []
    for file in files:
        yield {"op": "artifact", "file": file.name, "to": ""}
    yield {"op": "end", "status": status, "time_ms": now}
