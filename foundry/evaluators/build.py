"""Builders of a run's evaluators and stop rules."""

import logging
from collections.abc import Mapping
from typing import Any

from hydra.errors import InstantiationException

from foundry.config.build import build, check_methods
from foundry.config.metrics import check_metrics, val_metric_names
from foundry.core.errors import ConfigError, Violation, first_line
from foundry.core.protocols import Evaluator, Objective, RunContext, StopRule
from foundry.evaluators.drawn_samples import DrawnSamples
from foundry.parts.data import simulator_factory
from foundry.training.early_stopping import EarlyStopping

log = logging.getLogger(__name__)


def build_evaluators(run: RunContext, objective: Objective) -> dict[str, Evaluator]:
    """Build the evaluators by name, including the one that generates samples.

    Raises:
        ConfigError: a metric of torchmetrics cannot be built, an evaluator has no `evaluate` for these arguments, or a
            setting selects a metric that no evaluator declares, although all evaluators declare their metrics.
    """
    evaluators, metric_names = dict[str, Evaluator](), list[str]()
    evaluation, data, are_known = run.config.evaluation, run.data, True
    for name, node in evaluation.evaluators.items():
        if node is None:
            continue
        try:
            evaluator = _build_for_evaluation(run, objective, node)
        except InstantiationException as error:
            if "torchmetrics" not in node:
                raise  # an error in a custom evaluator keeps its traceback
            raise ConfigError(Violation(f"evaluation.evaluators.{name}", first_line(str(error)))) from error
        check_methods(evaluator, Evaluator, f"evaluation.evaluators.{name}._target_")
        names = node["metrics"] if "metrics" in node else getattr(evaluator, "metrics", None)
        are_known = are_known and names is not None
        metric_names += val_metric_names(names or ())
        evaluators[name] = evaluator
    keep_best = run.config.checkpoint.keep_best
    if are_known and (violations := list(check_metrics(evaluation, keep_best, dict.fromkeys(metric_names)))):
        raise ConfigError(violations)
    if evaluation.write_samples and objective.generate is not None:
        if data.tokens_per_sample is not None and data.tokenizer is None:
            log.warning("no samples are generated: the data has tokens but no tokenizer; set data.tokenizer")
            return evaluators
        evaluators["drawn_samples"] = DrawnSamples(objective=objective, data=data)
    return evaluators


def build_stop_rules(run: RunContext, objective: Objective) -> dict[str, StopRule]:
    """Build the stop rules by name, early stopping included.

    Raises:
        ConfigError: a rule lacks a method of `StopRule`, or the method does not accept the arguments of a run.
    """
    evaluation = run.config.evaluation
    nodes = [(name, node) for name, node in evaluation.stop_rules.items() if node is not None]
    rules: dict[str, StopRule] = {"early_stopping": EarlyStopping(evaluation.early_stopping)}
    for name, node in nodes:
        rules[name] = _build_for_evaluation(run, objective, node)
        check_methods(rules[name], StopRule, f"evaluation.stop_rules.{name}._target_")
    return rules


def _build_for_evaluation(run: RunContext, objective: Objective, node: Mapping[str, Any]) -> Any:
    """Build an evaluator or a stop rule with the optional arguments that its constructor accepts."""
    arguments = {
        "objective": objective,
        "data": run.data,
        "tokenizer": run.data.tokenizer,
        "judge": run.judge,
        "simulator": simulator_factory(run.config.simulator),
        "seed": run.seed,
        "per_gpu_batch_size": run.config.hparams.per_gpu_batch_size,
        "max_samples": run.config.evaluation.max_samples,
        "metrics": node.get("metrics"),
    }
    return build({name: value for name, value in node.items() if name != "metrics"}, optional=arguments)
