"""`rung.json` in a run directory: the rung where the run pauses; and the end of a paused run."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType

from foundry.run_dir.files import write_atomically
from foundry.run_dir.names import RUNG
from foundry.run_dir.result import find_result, write_result
from foundry.run_dir.status import write_status
from foundry.run_dir.strict_json import read_object

_TYPES: dict[str, type | tuple[type, ...]] = {"number": int, "at": (str, NoneType), "metric": str}


@dataclass(frozen=True, kw_only=True)
class Rung:
    """Rung where a run pauses for its search.

    Attributes:
        number: number of the rung, counted from 1.
        at: length of training at the rung, as a duration in the user's notation. None, or a length that is not below
            that of the run, to train to the end.
        metric: metric that the search compares, by its name in metrics.jsonl.
    """

    number: int
    at: str | None
    metric: str

    def save(self, run_dir: Path) -> None:
        """Write the rung to a run directory, before the run starts."""
        write_atomically(run_dir / RUNG, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, run_dir: Path) -> "Rung | None":
        """Return the rung of a run; None if no search pauses the run.

        Raises:
            DamagedFileError: the file was not written by a search.
        """
        try:
            content = read_object(run_dir / RUNG, required=_TYPES)
        except FileNotFoundError:
            return None
        return cls(**{name: content[name] for name in _TYPES})


def end_paused_run(run_dir: Path, reason: str) -> None:
    """Record that a paused run will not continue: like a run that a pruner has ended, it is finished and pruned."""
    write_result(run_dir, {**(find_result(run_dir) or {}), "status": "finished", "pruned": reason})
    write_status(run_dir, state="finished", reason=reason)
