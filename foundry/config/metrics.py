"""The metrics of an evaluation, by their names in metrics.jsonl, and the settings that choose one of them."""

from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from functools import cache

from omegaconf import DictConfig, OmegaConf

from foundry.config.schemas.checkpoint import KeepBest
from foundry.config.schemas.environment import Environment, NoEnvironment
from foundry.config.schemas.evaluation import Evaluation
from foundry.config.schemas.own_evaluators import ExactMatch, HeldOut
from foundry.config.schemas.root import Config
from foundry.core.errors import Violation, nearest
from foundry.core.tasks import EVALUATORS, modules_of

LOSS = "val_loss"
NORMS = ("grad_norm", "weight_norm", "update_norm")
"""Of blocks, as in `grad_norm/model.layers.0`: of the gradient before clipping, the weights, what an update changed."""
HELD_OUT = HeldOut._target_
EXACT_MATCH = ExactMatch._target_
EXACT_MATCH_METRICS = ("exact_match", "ended")


def val_metric_name(metric: str) -> str:
    """What an objective's own metric is called where it is measured on held-out data."""
    return f"val_{metric}"


def val_metric_names(metrics: Iterable[str]) -> tuple[str, ...]:
    """What metrics are called in an evaluation, each once."""
    return tuple(dict.fromkeys(map(val_metric_name, metrics)))


def declared(objective: object) -> tuple[str, ...] | None:
    """What held-out data measures by an objective, or its schema; None where `declared_metrics` says nothing."""
    metrics = declared_metrics(objective)
    return None if metrics is None else val_metric_names(("loss", *metrics))


def declared_metrics(objective: object) -> tuple[str, ...] | None:
    """The names that an objective, or its schema, has for its own metrics.

    Returns:
        None where nobody says: a part of the user's own need not have `metrics`, and no schema speaks for it.
    """
    if is_dataclass(objective) and getattr(objective, "_target_", None) != getattr(type(objective), "_target_", None):
        return None
    # A subclass with a loss of its own may measure what its parent does not know of.
    speaker = next((part for part in type(objective).__mro__ if {"metrics", "loss"} & set(vars(part))), None)
    if "metrics" not in {*getattr(objective, "__dict__", ()), *(vars(speaker) if speaker else ())}:
        return None
    metrics = getattr(objective, "metrics", None)
    are_names = isinstance(metrics, (tuple, list)) and all(isinstance(name, str) for name in metrics)
    return tuple(metrics) if metrics is not None and are_names else None


def check_metric(key: str, metric: str, measured: Iterable[str]) -> Iterator[Violation]:
    """Say that the metric which `key` chooses is none of those that are measured."""
    known = list(measured)
    if metric not in known:
        listed = ", ".join(known) or "nothing: there is no evaluator, so set it to null"
        yield Violation(key, f"is {metric.strip() or 'empty'} but evaluations measure {listed}{nearest(metric, known)}")


def measured_by(config: Config) -> tuple[str, ...] | None:
    """What evaluations of a run measure, as far as schemas and settings say; None where one does not.

    None, too, if the environment is missing that the objective needs, since its rewards are unknown.
    """
    measured, needs_rewards = list[str](), getattr(config.objective, "needs_rewards", False)
    for node in filter(None, config.evaluation.evaluators.values()):
        names = node.get("metrics") if isinstance(node, dict) else None
        if isinstance(node, dict) and node.get("torchmetrics"):  # what one of them measures it knows itself
            return None
        if isinstance(node, dict) and node.get("_target_") == HELD_OUT:
            known = declared(config.objective)
        elif isinstance(node, dict) and node.get("_target_") == EXACT_MATCH:
            rewards = reward_metrics(config.environment)
            if rewards is None or (needs_rewards and not rewards):
                return None
            known = val_metric_names((*EXACT_MATCH_METRICS, *rewards))
        elif isinstance(node, dict) and (own := _metrics_of_tasks().get(str(node.get("_target_")))) is not None:
            known = val_metric_names(own)
        else:
            known = val_metric_names(names) if isinstance(names, list) else None
        if known is None:
            return None
        measured += known
    return tuple(dict.fromkeys(measured))


@cache
def _metrics_of_tasks() -> dict[str, tuple[str, ...]]:
    """Return the metrics of the evaluators that tasks bring, by `_target_`; each of their schemas has `metrics`."""
    found: dict[str, tuple[str, ...]] = {}
    for value in (value for module in modules_of(EVALUATORS) for value in vars(module).values()):
        target, metrics = getattr(value, "_target_", None), getattr(value, "metrics", None)
        if isinstance(target, str) and metrics is not None:
            found[target] = tuple(metrics)
    return found


def reward_metrics(environment: object) -> tuple[str, ...] | None:
    """What scored answers are measured by, given the group `environment`; None where the environment does not say.

    The reward is the weighted sum of the scores, whose names follow; the last is the share of answers without one.
    """
    if isinstance(environment, NoEnvironment) and environment._target_ is None:
        return ()
    if not isinstance(environment, Environment) or environment._target_ != getattr(type(environment), "_target_", None):
        return None
    return reward_metric_names(environment.scores)


def reward_metric_names(scores: Iterable[str]) -> tuple[str, ...]:
    """What rewards are measured as, given the names of the scores."""
    return ("reward", *(f"reward_{name}" for name in scores), "reward_missing")


def check_metrics(evaluation: Evaluation, keep_best: KeepBest, measured: Iterable[str]) -> Iterator[Violation]:
    """Check every setting of a run that chooses a metric; those that follow the run's are checked with it."""
    known, own = list(measured), evaluation.metric
    chosen = {
        "evaluation.metric": own,
        "checkpoint.keep_best.metric": keep_best.metric,
        "evaluation.early_stopping.metric": evaluation.early_stopping.metric,
    }
    for key, metric in chosen.items():
        if metric is not None and (metric != own or key == "evaluation.metric"):
            yield from check_metric(key, metric, known)


def check_sweeper(composed: DictConfig, config: Config) -> Iterator[Violation]:
    """Check what the jobs of a sweep are compared by, where the sweeper is one of foundry's."""
    metric = OmegaConf.select(composed, "hydra.sweeper.metric")
    measured = measured_by(config)
    if metric is not None and measured is not None and metric != config.evaluation.metric:
        yield from check_metric("hydra.sweeper.metric", str(metric), measured)
