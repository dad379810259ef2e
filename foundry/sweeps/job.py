"""One job of a sweep, from the grid or search that proposes it to `sweep.json` and the report."""

import hashlib
import json
from dataclasses import dataclass

from foundry.config.composition.job_overrides import respell_targets
from foundry.core.part_names import first_path


@dataclass(frozen=True, kw_only=True)
class Job:
    """One point of a sweep.

    Attributes:
        swept: those of its overrides that other jobs of the sweep have with other values.
        overrides: everything that it is composed from; empty for one that was read from `sweep.json`.
        index: its number, which a resumed sweep does not give to another; -1 until it has one.
        dir: its run directory, relative to the sweep's; empty until it has one.
        config_hash: of the configuration that it composes to; empty until it is composed.
    """

    swept: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    index: int = -1
    dir: str = ""
    config_hash: str = ""

    @property
    def id(self) -> str:
        """The same for the same point, whatever else the sweep has, in whatever order and spelling it was typed."""
        points = sorted(respell_targets(override, first_path) for override in self.swept)
        return hashlib.sha256(json.dumps(points).encode()).hexdigest()[:16]

    @property
    def settings(self) -> str:
        """What tells it from the other jobs."""
        return ", ".join(self.swept)

    def __str__(self) -> str:
        if self.index < 0:
            return self.settings
        return f"job {self.index} ({self.settings})" if self.swept else f"job {self.index}"
