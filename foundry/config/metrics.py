"""Names of the metrics of an evaluation in metrics.jsonl, and checks of settings that choose a metric."""

from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from functools import cache

from omegaconf import DictConfig, OmegaConf

from foundry.config.schemas.built_in_evaluators import ExactMatch, HeldOut
from foundry.config.schemas.checkpoint import KeepBest
from foundry.config.schemas.evaluation import Evaluation
from foundry.config.schemas.root import Config
from foundry.core.errors import Violation, nearest
from foundry.core.tasks import EVALUATORS, modules_of

LOSS = "val_loss"
NORMS = ("grad_norm", "weight_norm", "update_norm")
"""Norms per block, such as `grad_norm/model.layers.0`: gradient before clipping, weights, and change by an update."""
HELD_OUT = HeldOut._target_
EXACT_MATCH = ExactMatch._target_
EXACT_MATCH_METRICS = ("exact_match", "ended")


def val_metric_name(metric: str) -> str:
    """Return the name of an objective's metric when it is computed on held-out data."""
    return f"val_{metric}"


def val_metric_names(metrics: Iterable[str]) -> tuple[str, ...]:
    """Return the names of an objective's metrics when they are computed on held-out data, without duplicates."""
    return tuple(dict.fromkeys(map(val_metric_name, metrics)))


def held_out_metrics(objective: object) -> tuple[str, ...] | None:
    """Return the names of an objective's metrics on held-out data, with the loss; None if they are not declared."""
    metrics = declared_metrics(objective)
    return None if metrics is None else val_metric_names(("loss", *metrics))


def declared_metrics(objective: object) -> tuple[str, ...] | None:
    """Return the names of the metrics that an objective, or its schema, computes in addition to the loss.

    Returns:
        The names; None if they are unknown, as for a custom objective without an attribute `metrics`.
    """
    if is_dataclass(objective) and getattr(objective, "_target_", None) != getattr(type(objective), "_target_", None):
        return None
    # A subclass that overrides the loss may compute other metrics than its parent declares.
    declaring_class = next((part for part in type(objective).__mro__ if {"metrics", "loss"} & set(vars(part))), None)
    if "metrics" not in {*getattr(objective, "__dict__", ()), *(vars(declaring_class) if declaring_class else ())}:
        return None
    metrics = getattr(objective, "metrics", None)
    are_names = isinstance(metrics, (tuple, list)) and all(isinstance(name, str) for name in metrics)
    return tuple(metrics) if metrics is not None and are_names else None


def check_metric(key: str, metric: str, computed: Iterable[str]) -> Iterator[Violation]:
    """Yield an error if the metric that the setting `key` chooses is not computed."""
    metrics = list(computed)
    if metric not in metrics:
        text = ", ".join(metrics) or "nothing, because there is no evaluator; set it to null"
        yield Violation(key, f"is {metric.strip() or 'empty'} but evaluations measure {text}{nearest(metric, metrics)}")


def computed_metrics(config: Config) -> tuple[str, ...] | None:
    """Return the metrics that evaluations of a run compute; None if the metrics of one evaluator are unknown.

    The metrics of `ExactMatch` are unknown for a custom environment, and if an objective that needs rewards has no
    environment.
    """
    metrics, needs_rewards = list[str](), getattr(config.objective, "needs_rewards", False)
    for node in filter(None, config.evaluation.evaluators.values()):
        names = node.get("metrics") if isinstance(node, dict) else None
        if isinstance(node, dict) and node.get("torchmetrics"):  # torchmetrics define their names at run time
            return None
        if isinstance(node, dict) and node.get("_target_") == HELD_OUT:
            node_metrics = held_out_metrics(config.objective)
        elif isinstance(node, dict) and node.get("_target_") == EXACT_MATCH:
            rewards = reward_metrics(config.environment)
            if rewards is None or (needs_rewards and not rewards):
                return None
            node_metrics = val_metric_names((*EXACT_MATCH_METRICS, *rewards))
        elif (
            isinstance(node, dict) and (task_metrics := _metrics_of_tasks().get(str(node.get("_target_")))) is not None
        ):
            node_metrics = val_metric_names(task_metrics)
        else:
            node_metrics = val_metric_names(names) if isinstance(names, list) else None
        if node_metrics is None:
            return None
        metrics += node_metrics
    return tuple(dict.fromkeys(metrics))


@cache
def _metrics_of_tasks() -> dict[str, tuple[str, ...]]:
    """Return the metrics of the evaluators of tasks, keyed by `_target_`, as their schemas declare in `metrics`."""
    metrics_by_target: dict[str, tuple[str, ...]] = {}
    for value in (value for module in modules_of(EVALUATORS) for value in vars(module).values()):
        target, metrics = getattr(value, "_target_", None), getattr(value, "metrics", None)
        if isinstance(target, str) and metrics is not None:
            metrics_by_target[target] = tuple(metrics)
    return metrics_by_target


def reward_metrics(environment: object) -> tuple[str, ...] | None:
    """Return the metrics of scored completions for the group `environment`; None if they are unknown."""
    if getattr(environment, "_target_", None) != getattr(type(environment), "_target_", None):
        return None
    return getattr(environment, "metrics", None)


def check_metrics(evaluation: Evaluation, keep_best: KeepBest, computed: Iterable[str]) -> Iterator[Violation]:
    """Check every setting of a run that chooses a metric; one equal to `evaluation.metric` gives no second error."""
    metrics, main_metric = list(computed), evaluation.metric
    metric_settings = {
        "evaluation.metric": main_metric,
        "checkpoint.keep_best.metric": keep_best.metric,
        "evaluation.early_stopping.metric": evaluation.early_stopping.metric,
    }
    for key, metric in metric_settings.items():
        if metric is not None and (metric != main_metric or key == "evaluation.metric"):
            yield from check_metric(key, metric, metrics)


def check_sweeper(composed: DictConfig, config: Config) -> Iterator[Violation]:
    """Check the metric that a sweeper of foundry uses to compare jobs."""
    metric = OmegaConf.select(composed, "hydra.sweeper.metric")
    computed = computed_metrics(config)
    if metric is not None and computed is not None and metric != config.evaluation.metric:
        yield from check_metric("hydra.sweeper.metric", str(metric), computed)
