import json
import math
from functools import partial

import pytest

from foundry.config.schemas import evaluation
from foundry.config.schemas.evaluation import Mode, PatienceUnit
from foundry.core.errors import ConfigError
from foundry.training.early_stopping import EarlyStopping

EVALUATIONS = PatienceUnit.evaluations
Settings = partial(evaluation.EarlyStopping, metric="val_loss", mode=Mode.min)


def verdicts(settings, values, epochs=None):
    stopping = EarlyStopping(settings)
    epochs = [0] * len(values) if epochs is None else epochs
    return [stopping.update({settings.metric: value}, epoch) for value, epoch in zip(values, epochs, strict=True)]


def test_early_stopping_is_off_by_default():
    assert verdicts(Settings(), [1.0, 2.0, math.nan] * 20) == [None] * 60


def test_early_stopping_patience_counts_evaluations():
    message = verdicts(Settings(patience=2, unit=EVALUATIONS), [1.0, 1.1, 0.9, 0.9, 0.8995])
    assert message == [None] * 4 + ["val_loss has not improved on 0.9 by more than 0.001 in 2 evaluations"]


def test_early_stopping_patience_counts_epochs_not_evaluations():
    epochs = [0, 0, 0, 1, 1, 1, 2, 2]
    message = verdicts(Settings(patience=2), [1.0] * 8, epochs)
    assert [reason is not None for reason in message] == [False] * 6 + [True] * 2
    assert message[6] == "val_loss has not improved on 1 by more than 0.001 in 2 epochs"


def test_improvement_of_exactly_min_delta_does_not_count():
    settings = Settings(patience=1, unit=EVALUATIONS, min_delta=0.25)
    assert verdicts(settings, [1.0, 0.75]) == [None, "val_loss has not improved on 1 by more than 0.25 in 1 evaluation"]
    assert verdicts(settings, [1.0, 0.74]) == [None, None]


def test_early_stopping_in_max_mode_expects_higher_values():
    settings = Settings(patience=1, unit=EVALUATIONS, metric="val_accuracy", mode=Mode.max, min_delta=0.0)
    message = verdicts(settings, [0.5, 0.6, 0.6])
    assert message == [None, None, "val_accuracy has not improved on 0.6 by more than 0 in 1 evaluation"]


@pytest.mark.parametrize(("value", "message"), [(math.nan, "val_loss is nan"), (math.inf, "val_loss is inf")])
def test_nonfinite_metric_stops_at_once(value, message):
    assert verdicts(Settings(patience=10), [1.0, value]) == [None, message]


def test_early_stopping_on_an_unmeasured_metric_is_refused():
    stopping = EarlyStopping(Settings(patience=1, metric="val_los"))
    with pytest.raises(ConfigError, match="is val_los but evaluations measure val_loss; did you mean val_loss"):
        stopping.update({"val_loss": 1.0}, 0)


@pytest.mark.parametrize("unit", PatienceUnit)
def test_early_stopping_state_survives_json(unit):
    settings = Settings(patience=3, unit=unit)
    values, epochs = [1.0, 1.0, 1.0, 1.0], [0, 1, 2, 3]
    whole, first = EarlyStopping(settings), EarlyStopping(settings)
    message = [whole.update({"val_loss": value}, epoch) for value, epoch in zip(values, epochs, strict=True)]
    for value, epoch in list(zip(values, epochs, strict=True))[:2]:
        first.update({"val_loss": value}, epoch)
    second = EarlyStopping(settings)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rest = [second.update({"val_loss": value}, epoch) for value, epoch in list(zip(values, epochs, strict=True))[2:]]
    assert rest == message[2:]
    assert message[3] is not None


def test_early_stopping_state_before_any_evaluation_is_restored():
    state = json.loads(json.dumps(EarlyStopping(Settings(patience=1)).state_dict()))
    stopping = EarlyStopping(Settings(patience=1))
    stopping.load_state_dict(state)
    assert stopping.update({"val_loss": 5.0}, 4) is None
    assert stopping.best == 5.0
