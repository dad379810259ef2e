"""The best evaluation so far."""

import math
from collections.abc import Mapping
from typing import Any

from foundry.config.metrics import check_metric
from foundry.config.schemas.checkpoint import KeepBest
from foundry.config.schemas.evaluation import Mode
from foundry.core.errors import ConfigError
from foundry.core.state_values import read_optional_count, read_optional_number


class Best:
    """Remembers where a held-out metric was best.

    Attributes:
        step: optimizer steps taken then; None before the first finite value.
        value: of the metric.
    """

    def __init__(self, settings: KeepBest, metric: str | None) -> None:
        """Remember the settings.

        Args:
            settings: of the checkpoint to keep; where they name no metric, none is kept.
            metric: of the run, where the settings name none; None: there is no best.
        """
        self._metric = settings.metric or metric
        self._sign = 1.0 if settings.mode is Mode.min else -1.0
        self._min_delta, self._is_kept = settings.min_delta, settings.metric is not None
        self.step: int | None = None
        self.value: float | None = None

    def update(self, metrics: Mapping[str, float], step: int) -> bool:
        """Take in an evaluation; whether its checkpoint is to be kept as the best.

        Args:
            metrics: by their names in metrics.jsonl.
            step: optimizer steps taken.

        Raises:
            ConfigError: the metric is none of those measured.
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
        return self._is_kept

    def result(self) -> dict[str, Any] | None:
        """What result.json says of it."""
        return None if self._metric is None or self.step is None else {"step": self.step, self._metric: self.value}

    def state_dict(self) -> dict[str, Any]:
        """Step and value; plain JSON."""
        return {"step": self.step, "value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.step, self.value = read_optional_count(state, "step"), read_optional_number(state, "value")
