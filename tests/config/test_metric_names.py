"""Settings that name a metric are checked at composition time against the metrics of the objective and evaluators."""

import sys

import pytest
import torch
from omegaconf import OmegaConf
from support.composition import compose, configure
from support.contexts import run_context

from foundry.config.build import build
from foundry.config.composition.store import group_schemas, writable
from foundry.config.metrics import held_out_metrics, val_metric_names
from foundry.config.schemas.evaluation import Mode
from foundry.core.errors import ConfigError
from foundry.data.splits import DataSplits
from foundry.evaluators.build import build_evaluators
from foundry.models.token_log_probs import read_log_probs
from foundry.parts.objective import build_objective

DATA = DataSplits(train=[], validation=[], fingerprint="")
KEYS = ["checkpoint.keep_best.metric", "evaluation.early_stopping.metric", "hydra.sweeper.metric"]
Z_LOSS = "hparams.z_loss_coefficient=0.1"


def refusal(*overrides):
    with pytest.raises(ConfigError) as refused:
        compose(*overrides)
    return str(refused.value).splitlines()


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", ["val_los", "loss", "Val_Loss", "train_loss", "val_z_loss", "", "step"])
def test_unmeasured_metric_gives_a_one_line_error(key, name):
    (line,) = refusal(f"hparams={'llm' if len(name) % 2 else 'diffusion'}", f"{key}={name!r}")
    assert line.startswith(f"{key}: is {name} but evaluations measure val_loss" if name else f"{key}: is empty")


def test_metric_error_suggests_the_nearest_name():
    (line,) = refusal(Z_LOSS, "checkpoint.keep_best.metric=val_zloss")
    assert line == (
        "checkpoint.keep_best.metric: is val_zloss but evaluations measure val_loss, val_cross_entropy, val_z_loss; "
        "did you mean val_z_loss?"
    )


@pytest.mark.parametrize("key", KEYS)
def test_metrics_of_the_objective_are_accepted(key):
    for name in ("val_cross_entropy", "val_z_loss", "val_loss"):
        config = compose(Z_LOSS, f"{key}={name}")
        assert key.startswith("hydra.") or OmegaConf.select(config, key) == name


def test_keep_best_metric_may_be_null():
    assert configure("checkpoint.keep_best.metric=null").checkpoint.keep_best.metric is None


@pytest.mark.parametrize("sweeper", ["foundry", "optuna"])
def test_both_sweepers_validate_their_metric(sweeper):
    (line,) = refusal(f"hydra/sweeper={sweeper}", "hydra.sweeper.metric=loss")
    assert line.endswith("did you mean val_loss?")


class Model(torch.nn.Module):
    """A model with the outputs that any objective needs."""

    def forward(self, inputs, targets=None, *_, **asked):
        if not inputs.is_floating_point():
            return read_log_probs(torch.zeros(*inputs.shape, 5), targets, **asked)
        return torch.zeros_like(inputs)


def microbatch(wants):
    position = torch.arange(2)
    if "images" in wants:
        return {"images": torch.zeros(2, 1, 8, 8), "labels": torch.zeros(2, dtype=torch.int64), "position": position}
    if "actions" in wants:
        chunk = {"actions": torch.zeros(2, 8, 2), "is_padded": torch.zeros(2, 8, dtype=torch.bool)}
        return {**chunk, "state": torch.zeros(2, 1, 3), "position": position}
    tokens = torch.ones(2, 2, 3, dtype=torch.int64) if "pairs" in wants else torch.ones(2, 3, dtype=torch.int64)
    return {"tokens": tokens, "targets": tokens, "position": position}


CHUNK = {"horizon": 8, "action_dim": 2}
TAUGHT = {"teacher": "runs/teacher", "vocab_size": 5, "max_seq_len": 3}
SETTINGS = {
    "NextToken": [{}, {"z_loss_coefficient": 0.1}],
    "SFT": [{}, {"z_loss_coefficient": 0.1}],
    "DPO": [{"reference": "copy"}],
    "GRPO": [
        {"num_generations_per_prompt": 2},
        {"num_generations_per_prompt": 2, "positive_example_nll_weight": 0.1},
    ],
    "Distillation": [TAUGHT, {**TAUGHT, "mode": "on_policy"}],
    "Diffusion": [{"num_classes": 10}],
    "DiffusionPolicy": [CHUNK],
    "FlowPolicy": [CHUNK],
    "ActionRegression": [CHUNK],
}
"""Settings that an objective requires or that change its metrics; other objectives use their defaults."""
OBJECTIVES = {name: schema for name, schema in group_schemas("objective").items() if hasattr(schema, "_target_")}


@pytest.mark.parametrize(
    ("name", "settings"), [(name, settings) for name in OBJECTIVES for settings in SETTINGS.get(name, [{}])], ids=str
)
def test_objective_returns_the_metrics_that_its_schema_declares(name, settings):
    root = compose()
    root.objective = OmegaConf.merge(writable(OBJECTIVES[name]), settings)
    schema = OmegaConf.to_object(root.objective)
    objective = build(schema)
    if objective.compare is not None:
        objective.compare({"reference": Model(), "teacher": Model()})
    batch = objective.example(2, 3) if objective.makes_samples else microbatch(schema.wants)
    returned = objective.loss(Model(), batch).metrics
    measured = val_metric_names(["loss", *returned])
    assert held_out_metrics(schema) == measured, f"`metrics` of the schema {name} must be {tuple(returned)}"
    assert held_out_metrics(objective) == measured, (
        f"the class of the objective {name} must have metrics = {tuple(returned)}"
    )


class Own:
    """A custom objective."""

    def __init__(self, metrics=None):
        if metrics is not None:
            self.metrics = metrics


class Silent(Own):
    """A custom objective with one declared metric."""

    metrics = ("perplexity",)


class Louder(Silent):
    """Overrides the loss, so the metrics declared by its parent do not apply."""

    def loss(self, model, microbatch):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("objective", "known"),
    [
        (Own(), None),
        (Own(metrics=("accuracy",)), ("val_loss", "val_accuracy")),
        (Own(metrics=["a", "b"]), ("val_loss", "val_a", "val_b")),
        (Own(metrics=lambda: 3), None),
        (Own(metrics={"a": 1}), None),
        (Silent(), ("val_loss", "val_perplexity")),
        (Louder(), None),
        ({"_target_": "own.Objective"}, None),
    ],
)
def test_custom_objective_may_declare_its_metrics(objective, known):
    assert held_out_metrics(objective) == known


def own(folder, monkeypatch, declaration):
    (folder / "own_objective.py").write_text(
        "from foundry.objectives.next_token import NextToken\n\n\n"
        f"class Mine(NextToken):\n    {declaration}\n\n    def loss(self, model, microbatch):\n"
        "        return super().loss(model, microbatch)\n"
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "own_objective", raising=False)


def evaluators(*overrides):
    config = configure(*overrides)
    run = run_context(config=config, data=DATA)
    return build_evaluators(run, build_objective(config.objective, config.peft))


def test_metric_of_a_declaring_custom_objective_is_checked_early(tmp_path, monkeypatch):
    own(tmp_path, monkeypatch, 'metrics = ("accuracy",)')
    overrides = ["objective._target_=own_objective.Mine", "checkpoint.keep_best.metric=val_acuracy"]
    with pytest.raises(ConfigError, match=r"is val_acuracy but .* val_loss, val_accuracy; did you mean val_accuracy\?"):
        evaluators(*overrides)


def test_metric_of_a_custom_objective_without_declaration_is_accepted(tmp_path, monkeypatch):
    own(tmp_path, monkeypatch, "")
    assert evaluators("objective._target_=own_objective.Mine", "checkpoint.keep_best.metric=val_whatever")


def test_keep_best_and_early_stopping_inherit_metric_and_direction():
    config = configure(Z_LOSS, "evaluation.metric=val_z_loss", "evaluation.direction=maximize")
    best, stopping = config.checkpoint.keep_best, config.evaluation.early_stopping
    assert (best.metric, best.mode, stopping.metric, stopping.mode) == ("val_z_loss", Mode.max) * 2


def test_keep_best_with_its_own_metric_minimizes_by_default():
    overrides = [
        "evaluation.metric=val_z_loss",
        "evaluation.direction=maximize",
        "checkpoint.keep_best.metric=val_loss",
    ]
    config = configure(Z_LOSS, *overrides)
    assert (config.checkpoint.keep_best.mode, config.evaluation.early_stopping.mode) == (Mode.min, Mode.max)


def test_wrong_run_metric_is_reported_once():
    (line,) = refusal("evaluation.metric=val_los")
    assert line == "evaluation.metric: is val_los but evaluations measure val_loss; did you mean val_loss?"


SUCCESS = "+evaluation.evaluators.robot={_target_: own_evaluator.Robot, metrics: [success]}"


def test_evaluator_metrics_are_valid_run_metrics(tmp_path, monkeypatch):
    (tmp_path / "own_evaluator.py").write_text("class Robot:\n    def __init__(self, episodes=1):\n        pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    compose(SUCCESS, "evaluation.metric=val_success", "evaluation.direction=maximize")
    compose(SUCCESS, "~evaluation.evaluators.held_out", "evaluation.metric=val_success")
    (line,) = refusal(SUCCESS, "evaluation.metric=val_succes")
    assert line.endswith("measure val_loss, val_success; did you mean val_success?")
    (line,) = refusal("~evaluation.evaluators.held_out")
    assert line.startswith("evaluation.metric: is val_loss but evaluations measure nothing")
    compose("~evaluation.evaluators.held_out", "evaluation.metric=null")
    silent = "+evaluation.evaluators.robot={_target_: own_evaluator.Robot, episods: 3}"
    (line,) = refusal(silent, "evaluation.metric=val_whatever")
    assert line.startswith(
        "evaluation.evaluators.robot.episods: is not an argument of own_evaluator.Robot; did you mean"
    )


def test_patience_requires_a_metric():
    (line,) = refusal("evaluation.metric=null", "evaluation.early_stopping.patience=3")
    assert line == "evaluation.early_stopping.metric: is null but patience is 3; name a metric"
    (line,) = refusal("+evaluation.evaluators.x=3")
    assert line.startswith("evaluation.evaluators.x: must be a mapping with a _target_")
