"""The file `mlflow_parent.json`, which links a job of a sweep to the sweep's parent run in MLflow.

A sweep writes the file into each job's run directory. The first job that reaches the store creates the parent run, and
`mlflow.json` in the sweep's directory records that run. So starting a sweep does not wait for a server, a job that is
queued again or sent later finds the same parent run, and a sweep without MLflow has no parent run.
"""

import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from foundry.config.composition.job_overrides import (
    brief,
    format_command,
    key_and_value,
    recorded_overrides,
    short_names,
)
from foundry.run_dir.files import write_atomically
from foundry.run_dir.names import MLFLOW_PARENT, SWEEP
from foundry.run_dir.redact import masked, masked_text
from foundry.run_dir.strict_json import DamagedFileError, read_object
from foundry.run_dir.sweep_file import read_sweep_file
from foundry.tracking.provenance import provenance


@dataclass(frozen=True, kw_only=True)
class ParentLink:
    """Link from a job to its sweep.

    Attributes:
        sweep: the sweep's directory, relative to the job's run directory.
        job: number of the job.
        swept: swept settings of the job by key; secrets are masked.
    """

    sweep: str
    job: int
    swept: Mapping[str, str]

    @classmethod
    def write(cls, run_dir: Path, sweep_dir: Path, job: int, overrides: Sequence[str]) -> None:
        """Write the link into a job's run directory, before the job starts."""
        swept = masked_values(map(key_and_value, overrides))
        link = cls(sweep=os.path.relpath(sweep_dir, run_dir), job=job, swept=swept)
        write_atomically(run_dir / MLFLOW_PARENT, json.dumps(asdict(link), indent=2) + "\n")

    @classmethod
    def load(cls, run_dir: Path) -> "ParentLink | None":
        """Read the link of a job; None for a run that does not belong to a sweep, or was copied out of one."""
        try:
            content = read_object(run_dir / MLFLOW_PARENT, required={"sweep": str, "job": int, "swept": dict})
        except (FileNotFoundError, DamagedFileError):
            return None
        swept = {str(key): str(value) for key, value in content["swept"].items()}
        link = cls(sweep=content["sweep"], job=content["job"], swept=swept)
        sweep_dir = (run_dir / link.sweep).resolve()
        is_above = run_dir.resolve().is_relative_to(sweep_dir) and run_dir.resolve() != sweep_dir
        return link if is_above and (sweep_dir / SWEEP).is_file() else None

    @property
    def run_name(self) -> str:
        """Name that distinguishes the jobs of a sweep, such as `3: lr=0.001 seed=1`."""
        names = short_names(list(self.swept))
        settings = " ".join(f"{names[key]}={brief(value)}" for key, value in self.swept.items())
        return f"{self.job}: {settings}" if settings else str(self.job)

    def tags(self, run_dir: Path) -> dict[str, str]:
        """Return the tags of the job's run: sweep, number, overrides, and the command that runs the job on its own."""
        sweep_dir = os.path.normpath(run_dir.absolute() / self.sweep)
        command = format_command(recorded_overrides(run_dir), _command(Path(sweep_dir)))
        return {
            "sweep_dir": sweep_dir,
            "sweep_job": str(self.job),
            "overrides": join_settings(self.swept),
            "command": masked_text(command),
        }


def masked_values(settings: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return settings by key, with masked secrets."""
    return {key: str(masked(value, key)) for key, value in settings}


def join_settings(settings: Mapping[str, str]) -> str:
    """Format settings as `key=value key=value`."""
    return " ".join(f"{key}={value}" for key, value in settings.items())


def _command(sweep_dir: Path) -> list[str]:
    return [str(word) for word in read_sweep_file(sweep_dir).get("command", ())]


def origin_tags(sweep_dir: Path) -> dict[str, str]:
    """Return the tags of a new parent run: user, command, code, launcher and metric of the sweep."""
    facts = read_sweep_file(sweep_dir)
    tags = provenance(Path.cwd())
    del tags["host"]  # other jobs may run on other hosts
    tags |= {name: str(facts[name]) for name in ("launcher", "metric", "direction") if name in facts}
    command = shlex.join(["python", "-m", "foundry", *_command(sweep_dir)])
    return tags | {"command": masked_text(command)}
