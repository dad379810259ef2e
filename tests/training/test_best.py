"""The step with the best value of a validation metric."""

import math

import pytest

from foundry.config.schemas.checkpoint import KeepBest
from foundry.config.schemas.evaluation import Mode
from foundry.training.best import Best


@pytest.mark.parametrize(
    ("settings", "values", "best_steps"),
    [
        ({"mode": Mode.min}, [3.0, 2.0, 2.0, 2.5, 1.0, math.nan], [1, 2, 5]),
        ({"mode": Mode.max}, [3.0, 2.0, 3.0, math.inf, 3.5], [1, 5]),
        ({"mode": Mode.min, "min_delta": 0.25}, [3.0, 2.875, 2.75, 2.625, 2.375], [1, 4]),
        ({"mode": Mode.max, "min_delta": 0.25}, [3.0, 3.125, 3.25, 3.5], [1, 4]),
    ],
)
def test_checkpoint_is_best_if_it_improves_by_more_than_min_delta(settings, values, best_steps):
    best = Best(KeepBest(metric="val_loss", **settings), None)
    assert [step for step, value in enumerate(values, 1) if best.update({"val_loss": value}, step)] == best_steps
    assert best.result() == {"step": best_steps[-1], "val_loss": values[best_steps[-1] - 1]}
