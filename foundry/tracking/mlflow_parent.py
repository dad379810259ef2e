"""One run in MLflow above those of a sweep's jobs.

The sweep writes `mlflow_parent.json` into each job's run directory. The first job that reaches the store makes the
parent, and the sweep's directory remembers it as a run directory remembers its run. So starting a sweep waits for no
server, a job that is queued again or sent later finds the same parent, and a sweep that logs nowhere has none.
"""

import fcntl
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from foundry.records.strict_json import write_atomically
from foundry.tracking.destination import Destination, tracking_uri
from foundry.tracking.masking import masked_text

FILE_NAME = "mlflow_parent.json"
_LOCK = ".mlflow.lock"
_GOING = {"queued", "running", "requeued"}


@dataclass(frozen=True, kw_only=True)
class ParentLink:
    """What a job knows of its sweep.

    Attributes:
        sweep: the sweep's directory, relative to the job's run directory.
        tags: of the job's run: which job of which sweep it is.
    """

    sweep: str
    tags: Mapping[str, str]

    @classmethod
    def write(cls, run_dir: Path, sweep_dir: Path, index: int, overrides: str) -> None:
        """Tell a job of its sweep, before it starts."""
        tags = {"sweep_dir": str(sweep_dir.absolute()), "sweep_job": str(index), "overrides": masked_text(overrides)}
        link = cls(sweep=os.path.relpath(sweep_dir, run_dir), tags=tags)
        write_atomically(run_dir / FILE_NAME, json.dumps(asdict(link), indent=2) + "\n")

    @classmethod
    def load(cls, run_dir: Path) -> "ParentLink | None":
        """The link of a job; None for a run that is of no sweep."""
        try:
            return cls(**json.loads((run_dir / FILE_NAME).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None

    def parent_id(self, run_dir: Path, child: Destination) -> str | None:
        """The id of the parent, which the first job to ask makes, and which is running again if it had ended.

        Args:
            run_dir: the job's.
            child: where the job's run is kept.

        Returns:
            None where the parent is in another store.
        """
        from foundry.tracking.mlflow_store import MlflowStore

        sweep_dir = (run_dir / self.sweep).resolve()
        with (sweep_dir / _LOCK).open("a") as lock:
            with suppress(OSError):  # a file system without locks: two first jobs may then make two parents
                fcntl.flock(lock, fcntl.LOCK_EX)  # unlike lockf it keeps threads of one process apart, too
            earlier = Destination.load(sweep_dir)
            if earlier is not None and earlier.uri != masked_text(child.uri):
                return None
            name = sweep_dir.name
            parent = Destination.of(sweep_dir, uri=child.uri, experiment_name=child.experiment_name, run_name=name)
            parent.save(sweep_dir)
            store = MlflowStore(sweep_dir, parent)
            store.apply([{"op": "start"}])
            return store.connect()[1]


def close_parent(sweep_dir: Path, *, uri: str | None = None, stopped: bool = False) -> None:
    """End the sweep's run in MLflow once no job is left that will run; where there is none, nothing is done.

    Args:
        sweep_dir: the sweep's directory.
        uri: the store with its credentials, which the directory does not remember; None: MLFLOW_TRACKING_URI.
        stopped: the sweep was interrupted, so that those still queued will not run.

    Raises:
        Exception: what MLflow raises.
    """
    parent = Destination.load(sweep_dir)
    if parent is None or parent.run_id is None:
        return
    states = _states(sweep_dir)
    if _GOING & states and not stopped:
        return
    from foundry.tracking.mlflow_store import MlflowStore

    status = "KILLED" if stopped else "FINISHED" if states == {"finished"} else "FAILED"
    if parent.is_masked:
        parent = replace(parent, uri=tracking_uri(uri))
    end = {"op": "end", "status": status, "time_ms": time.time_ns() // 1_000_000}
    MlflowStore(sweep_dir, parent).apply([end])


def _states(sweep_dir: Path) -> set[str]:
    """How the jobs of a sweep are; one whose directory is gone is lost."""
    states = set()
    for job in json.loads((sweep_dir / "sweep.json").read_text(encoding="utf-8"))["jobs"]:
        try:
            states.add(json.loads((sweep_dir / job["dir"] / "status.json").read_text(encoding="utf-8"))["state"])
        except FileNotFoundError:
            states.add("lost")
    return states
