"""The best evaluation of a run so far."""

import math
from collections.abc import Mapping
from typing import Any

from foundry.config.metrics import check_metric
from foundry.config.schemas.checkpoint import KeepBest
from foundry.config.schemas.evaluation import Mode
from foundry.core.errors import ConfigError
from foundry.core.state_values import read_optional_count, read_optional_number


class Best:
    """Tracks the best value of a validation metric; a new value must be better by more than `min_delta`.

    Attributes:
        step: optimizer step of the best evaluation; None before the first finite value.
        value: best value of the metric; None before the first finite value.
    """

    def __init__(self, settings: KeepBest, metric: str | None) -> None:
        """Create the tracker.

        Args:
            settings: `checkpoint.keep_best`; without a metric in it, no checkpoint is kept as the best.
            metric: main metric of the run, used if `settings` names none; None disables tracking.
        """
        self._metric = settings.metric or metric
        self._sign = 1.0 if settings.mode is Mode.min else -1.0
        self._min_delta, self._keeps_checkpoint = settings.min_delta, settings.metric is not None
        self.step: int | None = None
        self.value: float | None = None

    def update(self, metrics: Mapping[str, float], step: int) -> bool:
        """Update with an evaluation; return True if this step's checkpoint should be kept as the best.

        Args:
            metrics: metrics by their names in metrics.jsonl.
            step: optimizer steps taken.

        Raises:
            ConfigError: the tracked metric is not among `metrics`.
        """
        if self._metric is None:
            return False
        if self._metric not in metrics:
            raise ConfigError(check_metric("checkpoint.keep_best.metric", self._metric, metrics))
        value = metrics[self._metric]
        if not math.isfinite(value):
            return False
        if self.value is not None and self._sign * value + self._min_delta >= self._sign * self.value:
            return False
        self.step, self.value = step, value
        return self._keeps_checkpoint

    def result(self) -> dict[str, Any] | None:
        """Return the entry `best` of result.json; None if no metric is tracked or no value was finite."""
        return None if self._metric is None or self.step is None else {"step": self.step, self._metric: self.value}

    def state_dict(self) -> dict[str, Any]:
        """Return step and value as plain JSON."""
        return {"step": self.step, "value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`."""
        self.step, self.value = read_optional_count(state, "step"), read_optional_number(state, "value")
