"""Early stopping: ends a run if its validation metric no longer improves."""

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
    """Watches a metric over the evaluations of a run; every rank sees the same values.

    A value is an improvement if it is better than the best value by more than `min_delta`, compared in float32 as in
    PyTorch Lightning's `EarlyStopping` (2.6.6). The best value changes only on an improvement.

    Attributes:
        best: best value so far; None before the first finite value.
        wait: evaluations or epochs since the best value was measured.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.best: float | None = None
        self.wait = 0
        self._best_epoch = 0

    def update(self, metrics: Mapping[str, float], epoch: int, share: float = 0.0) -> str | None:
        """Update with an evaluation.

        Args:
            metrics: metrics by their names in metrics.jsonl.
            epoch: epoch of the evaluated step's first sample, counted from 0.
            share: fraction of the run completed; unused.

        Returns:
            The reason to stop the run, such as a value that is not finite; None to continue.

        Raises:
            ConfigError: the metric of the settings is not among `metrics`.
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
        """Return an empty dict, because the trainer records the reason to stop."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, its epoch and the current wait as plain JSON."""
        return {"best": self.best, "wait": self.wait, "best_epoch": self._best_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict()`."""
        self.best = read_optional_number(state, "best")
        self.wait = read_count(state, "wait")
        self._best_epoch = read_count(state, "best_epoch")

    def _improves(self, value: float) -> bool:
        if self.best is None:
            return True
        # Compare in float32, as Lightning does.
        now = torch.tensor(value, dtype=torch.float32)
        best = torch.tensor(self.best, dtype=torch.float32)
        if self._settings.mode is Mode.max:
            return bool(now - self._settings.min_delta > best)
        return bool(now + self._settings.min_delta < best)
