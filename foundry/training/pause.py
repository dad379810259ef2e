"""Pause of a run at a rung of a search."""

from collections.abc import Mapping
from dataclasses import dataclass

from foundry.core.duration import Interval
from foundry.core.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Pause:
    """Rung of a run, which saves there, reports its metric to the search and ends, until the search continues it.

    Attributes:
        rung: number of the rung, counted from 1.
        at: length of training at the rung.
        metric: metric that the search compares, by its name in metrics.jsonl.
    """

    rung: int
    at: Interval
    metric: str

    def is_reached(self, progress: Progress) -> bool:
        """Return whether the run is at the rung or after it."""
        return self.at.is_reached(progress.steps, progress.samples, progress.tokens)

    def reason(self, step: int, metrics: Mapping[str, float]) -> str:
        """Return the reason of the pause for status.json, such as "rung 1 at 500 steps: val_loss 3.21"."""
        value = metrics.get(self.metric)
        measured = f"{self.metric} is not measured" if value is None else f"{self.metric} {value:.4g}"
        return f"rung {self.rung} at {step} step{'s' * (step != 1)}: {measured}"
