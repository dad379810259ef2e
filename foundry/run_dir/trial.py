"""`trial.json` in a run directory: the trial of a search that the run executes, and the search's pruner."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foundry.run_dir.files import write_atomically
from foundry.run_dir.names import STUDY, TRIAL
from foundry.run_dir.strict_json import read_object
from foundry.run_dir.study_storage import VARIABLE

SHARED = "shared"
_TYPES = {"journal": str, "study": str, "number": int, "metric": str, "pruner": dict}


@dataclass(frozen=True, kw_only=True)
class TrialLink:
    """Link from a run to the search that proposed it.

    Attributes:
        journal: file that holds the study, relative to the run directory; `SHARED` for a study that several commands
            share, whose location is in the environment.
        study: name of the study in the journal.
        number: number of the trial.
        metric: metric that the pruner compares, named as in metrics.jsonl.
        pruner: `_target_` and arguments of the pruner.
    """

    journal: str
    study: str
    number: int
    metric: str
    pruner: Mapping[str, Any]

    def save(self, run_dir: Path) -> None:
        """Write the link to a run directory, before the run starts."""
        write_atomically(run_dir / TRIAL, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, run_dir: Path) -> "TrialLink | None":
        """Return the link of a run; None if the run is not part of a search, or the search has no pruner.

        Raises:
            DamagedFileError: the file was not written by a search.
        """
        try:
            content = read_object(run_dir / TRIAL, required=_TYPES)
        except FileNotFoundError:
            return None
        return cls(**{name: content[name] for name in _TYPES})

    def location(self, run_dir: Path) -> str:
        """Return the location of the study, which Optuna writes to; empty if it is shared and not in the environment.

        Raises:
            ValueError: the file is missing, or not in a sweep directory that contains the run.
        """
        if self.journal == SHARED:
            return os.environ.get(VARIABLE, "")
        journal = run_dir / self.journal
        folder = journal.parent.resolve()
        is_above = folder in run_dir.resolve().parents and journal.name == STUDY
        if not is_above or journal.is_symlink() or not journal.is_file():
            raise ValueError(f"{self.journal!r} is not the {STUDY} of a sweep that contains the run")
        return str(folder / STUDY)
