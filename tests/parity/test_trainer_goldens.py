"""Evaluation times and early stopping as in PyTorch Lightning: every case of goldens/trainer.json, bit for bit."""

import json
from pathlib import Path

import pytest

from foundry.config.schemas.evaluation import EarlyStopping, Evaluation, PatienceUnit
from foundry.core.batch_sizes import BatchSizes
from foundry.core.duration import Budget
from foundry.training import early_stopping

CASES = json.loads((Path(__file__).parent / "goldens" / "trainer.json").read_text())["cases"]


def cases(kind):
    found = [case for case in CASES if case["id"].startswith(f"trainer/{kind}/")]
    return pytest.mark.parametrize("case", found, ids=[case["id"] for case in found])


@cases("val_check")
@pytest.mark.parametrize("batch_size", [1, 3])
def test_evaluation_steps_match_lightning(case, batch_size):
    batches, epochs = case["inputs"]["batches_per_epoch"], case["inputs"]["epochs"]
    each = batches * batch_size
    budget = Budget(total_samples=each * epochs, batch_sizes=BatchSizes.constant(batch_size), samples_per_epoch=each)
    interval = Evaluation(interval=case["config"]["val_check_interval"]).interval_in(budget)
    steps = range(1, batches * epochs + 1)
    due = [step for step in steps if interval.due(step, batch_size * (step - 1), batch_size * step)]
    assert due == case["outputs"]["validated_after_batch"]


@cases("early_stop")
def test_early_stopping_matches_lightning(case):
    stopping = early_stopping.EarlyStopping(
        EarlyStopping(metric="val_loss", unit=PatienceUnit.evaluations, **case["config"])
    )
    seen = []
    for loss in case["inputs"]["val_losses"]:
        reason = stopping.update({"val_loss": float(loss)}, 0)
        seen.append([reason is not None, stopping.wait, stopping.best])
    assert seen == case["outputs"]["stop_wait_best_per_check"]


def test_trainer_goldens_are_complete():
    assert len(CASES) == 6
