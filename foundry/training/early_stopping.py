"""Ending a run whose held-out metric no longer improves."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from foundry.config.metrics import check_metric
from foundry.config.schemas.evaluation import EarlyStopping as Settings
from foundry.config.schemas.evaluation import Mode, PatienceUnit
from foundry.core.errors import ConfigError
from foundry.core.state_values import read_count, read_optional_number


class EarlyStopping:
    """Watches a metric over the evaluations of a run; every rank sees the same numbers.

    A value improves on the best if it is better by more than `min_delta`, compared in float32 as the criterion of
    PyTorch Lightning (`EarlyStopping`, 2.6.6) is. The best moves only then.

    Attributes:
        best: None before the first evaluation.
        wait: evaluations or epochs since then.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.best: float | None = None
        self.wait = 0
        self._best_epoch = 0

    def update(self, metrics: Mapping[str, float], epoch: int, share: float = 0.0) -> str | None:
        """Take in an evaluation.

        Args:
            metrics: by their names in metrics.jsonl.
            epoch: the one in which the evaluated step began; the first is 0.
            share: of the run that is done; it does not matter.

        Returns:
            Why the run is to stop; None: it continues.

        Raises:
            ConfigError: the metric is none of those measured.
        """
        name, patience = self._settings.metric, self._settings.patience
        if patience is None or name is None:
            return None
        if name not in metrics:
            raise ConfigError(check_metric("evaluation.early_stopping.metric", name, metrics))
        value = metrics[name]
        if not math.isfinite(value):
            return f"{name} is {value}"
        if self._improves(value):
            self.best = torch.tensor(value, dtype=torch.float32).item()
            self.wait = 0
            self._best_epoch = epoch
            return None
        is_epochs = self._settings.unit is PatienceUnit.epochs
        self.wait = epoch - self._best_epoch if is_epochs else self.wait + 1
        if self.wait < patience:
            return None
        unit = self._settings.unit.value.removesuffix("s") if self.wait == 1 else self._settings.unit.value
        return (
            f"{name} has not improved on {self.best:g} by more than {self._settings.min_delta:g} in {self.wait} {unit}"
        )

    def result(self) -> dict[str, Any]:
        """Nothing: the reason is the run's."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Best value, where it was, and how long ago; plain JSON."""
        return {"best": self.best, "wait": self.wait, "best_epoch": self._best_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.best = read_optional_number(state, "best")
        self.wait = read_count(state, "wait")
        self._best_epoch = read_count(state, "best_epoch")

    def _improves(self, value: float) -> bool:
        if self.best is None:
            return True
        # Tensors of torch's default type, as in Lightning.
        now = torch.tensor(value, dtype=torch.float32)
        best = torch.tensor(self.best, dtype=torch.float32)
        if self._settings.mode is Mode.max:
            return bool(now - self._settings.min_delta > best)
        return bool(now + self._settings.min_delta < best)
