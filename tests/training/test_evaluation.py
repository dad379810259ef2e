"""Results of evaluators."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from foundry.core.errors import ConfigError
from foundry.core.protocols import RunContext
from foundry.training.evaluation import Evaluation


def measure(tmp_path, **results):
    """Return the metrics of evaluators that return `results`."""
    evaluators = {
        name: SimpleNamespace(evaluate=lambda model, context, result=result: result) for name, result in results.items()
    }
    run = RunContext(config=None, config_hash="", world=None, precision=None, data=None, judge=None, run_dir=tmp_path)
    evaluation = Evaluation(model=nn.Linear(2, 1), evaluators=evaluators, run=run, folder=tmp_path)
    return evaluation.measure(1, lambda activity: None)[0]


def test_values_may_be_of_any_class_of_numbers(tmp_path):
    metrics = measure(tmp_path, one={"a": 1, "b": torch.tensor([0.5])}, other={"loss": True, "c": 2.5})
    assert metrics == {"val_a": 1.0, "val_b": 0.5, "val_loss": 1.0, "val_c": 2.5}
    assert all(type(value) is float for value in metrics.values())


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (None, "an object of type NoneType"),
        ([0.5], "an object of type list"),
        ({"a": [0.5]}, "[0.5] for a"),
        ({"b": 1.0, "a": None}, "null for a"),
        ({"a": "high"}, "high for a"),
        ({"a": torch.ones(2)}, "tensor([1., 1.]) for a"),
    ],
)
def test_other_results_are_refused_with_the_name_of_the_evaluator(tmp_path, result, problem):
    with pytest.raises(ConfigError) as error:
        measure(tmp_path, mine=result)
    assert str(error.value) == (
        f"evaluation.evaluators.mine._target_: builds SimpleNamespace, whose evaluate() returns {problem} but must "
        "return a mapping of names to numbers"
    )


def test_metric_of_two_evaluators_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"evaluators\.other: measures val_a, which an earlier evaluator also measures"
    ):
        measure(tmp_path, one={"a": 1}, other={"a": 2})
