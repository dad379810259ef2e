"""`trial.json` in a run directory: which trial of a search the run is, and who may end it early."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundry.run_dir.files import write_atomically
from foundry.run_dir.names import STUDY, TRIAL
from foundry.run_dir.strict_json import read_object

if TYPE_CHECKING:
    from optuna.storages import JournalStorage

_TYPES = {"journal": str, "study": str, "number": int, "metric": str, "pruner": dict}


@dataclass(frozen=True, kw_only=True)
class TrialLink:
    """What a run knows of the search that proposed it.

    Attributes:
        journal: the file that holds the study, relative to the run directory.
        study: its name there.
        number: of the trial.
        metric: what it is judged by, as it is called in metrics.jsonl.
        pruner: `_target_` and arguments of the one who judges.
    """

    journal: str
    study: str
    number: int
    metric: str
    pruner: Mapping[str, Any]

    def save(self, run_dir: Path) -> None:
        """Tell a run of its search, before it starts."""
        write_atomically(run_dir / TRIAL, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, run_dir: Path) -> "TrialLink | None":
        """The link of a run; None for one that no search has proposed, or that is to run to its end.

        Raises:
            DamagedFileError: the file is not what a search writes.
        """
        try:
            content = read_object(run_dir / TRIAL, needed=_TYPES)
        except FileNotFoundError:
            return None
        return cls(**{name: content[name] for name in _TYPES})

    def resolve_journal(self, run_dir: Path) -> Path:
        """The file of the study, which lies in the directory of the sweep, above the run's: Optuna appends to it.

        Raises:
            ValueError: it is another, or missing.
        """
        journal = run_dir / self.journal
        folder = journal.parent.resolve()
        is_above = folder in run_dir.resolve().parents and journal.name == STUDY
        if not is_above or journal.is_symlink() or not journal.is_file():
            raise ValueError(f"{self.journal!r} is no {STUDY} of a sweep around it")
        return folder / STUDY


def open_storage(journal: Path) -> "JournalStorage":
    """Where Optuna keeps a study: a file of JSON lines, to which processes of several machines may append."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return JournalStorage(JournalFileBackend(str(journal)))
