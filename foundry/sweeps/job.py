"""A job of a sweep, from its proposal by a grid or search to `sweep.json` and the report."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foundry.config.composition.job_overrides import respell_targets
from foundry.core.part_names import original_path


@dataclass(frozen=True, kw_only=True)
class Job:
    """One point of a sweep.

    Attributes:
        swept: overrides whose values differ between the jobs of the sweep.
        overrides: all overrides of the job; empty if the job was read from `sweep.json`.
        index: number of the job, which a resumed sweep never reassigns; -1 before it is assigned.
        dir: run directory of the job, relative to the sweep directory; empty before it is assigned.
        config_hash: hash of the job's composed configuration; empty before composition.
    """

    swept: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    index: int = -1
    dir: str = ""
    config_hash: str = ""

    @classmethod
    def recorded(cls, entry: Mapping[str, Any]) -> "Job":
        """Return the job of an entry in `sweep.json`."""
        swept = tuple(map(str, entry["overrides"]))
        return cls(swept=swept, index=entry["index"], dir=entry["dir"], config_hash=entry.get("config_hash", ""))

    def as_recorded(self) -> dict[str, Any]:
        """Return the entry for `sweep.json`."""
        names = ("index", "dir", "config_hash", "id")
        return {"overrides": self.swept, **{name: getattr(self, name) for name in names}}

    @property
    def id(self) -> str:
        """Digest of the swept overrides, independent of their order, of renamed parts and of the other jobs."""
        points = sorted(respell_targets(override, original_path) for override in self.swept)
        return hashlib.sha256(json.dumps(points).encode()).hexdigest()[:16]

    @property
    def settings(self) -> str:
        """The swept overrides as text."""
        return ", ".join(self.swept)

    def __str__(self) -> str:
        if self.index < 0:
            return self.settings
        return f"job {self.index} ({self.settings})" if self.swept else f"job {self.index}"
