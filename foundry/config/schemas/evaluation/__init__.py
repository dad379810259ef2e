"""`evaluation=`: when and how the model is evaluated, and early stopping."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from importlib.util import find_spec
from typing import Any, ClassVar

from foundry.config.packages import missing_message
from foundry.config.setting import OnResume, setting
from foundry.core.duration import Budget, Duration, EpochInterval, Interval, Unit, parse_epoch_steps
from foundry.core.errors import Violation, as_text

_PATIENCE = "evaluation.early_stopping.patience"


class PatienceUnit(Enum):
    """Unit of the patience of early stopping."""

    evaluations = "evaluations"
    epochs = "epochs"


class Mode(Enum):
    """Optimization direction of a metric."""

    min = "min"
    max = "max"


class Direction(Enum):
    """Optimization direction of the metric of a run or sweep."""

    minimize = "minimize"
    maximize = "maximize"


def _default_evaluators() -> dict[str, Any]:
    return {"held_out": {"_target_": "foundry.evals.HeldOut"}}


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Settings of early stopping.

    The run stops when a validation metric no longer improves, or immediately if the metric is not finite.
    """

    patience: int | None = setting(
        None,
        "number of units without improvement after which the run stops; null: never",
        ge=1,
    )
    unit: PatienceUnit = setting(
        PatienceUnit.epochs,
        "unit of patience; if a step crosses the end of an epoch, its evaluation belongs to that epoch",
    )
    min_delta: float = setting(0.001, "a metric must improve on the best by more than this", ge=0)
    metric: str | None = setting("${evaluation.metric}", "name of the metric in metrics.jsonl")
    mode: Mode = setting("${mode_of:${.metric}}", "min: lower is better; max: higher is better")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Settings of evaluation during and after training, and of the stop rules."""

    offered: ClassVar[tuple[str, ...]] = (
        "objective",
        "data",
        "tokenizer",
        "judge",
        "simulator",
        "seed",
        "per_gpu_batch_size",
        "max_samples",
    )

    interval: int | float | str | None = setting(
        "0.25 run",
        'interval between evaluations: a number of optimizer steps, or a duration as text, such as "0.25 run"; '
        'counted anew in each epoch: a fraction of it, or text such as "10 epoch_steps"; null: only at the end',
    )
    max_samples: int | None = setting(
        None,
        "validation samples per evaluation, the same on any number of ranks; null: all",
        ge=1,
        le=10**15,
    )
    evaluators: dict[str, Any] = setting(
        _default_evaluators,
        "evaluators by name: `_target_`, its arguments and, optionally, `metrics`, the names of its metrics; null "
        "removes an evaluator: evaluation.evaluators.held_out=null removes the validation loss",
    )
    metric: str | None = setting(
        "val_loss",
        "main metric of the run, by its name in metrics.jsonl; default metric of the best checkpoint, early "
        "stopping, sweeps and result.json; null: no main metric",
    )
    direction: Direction = setting(Direction.minimize, "minimize: lower is better; maximize: higher is better")
    stop_rules: dict[str, Any] = setting(
        dict, "further rules that can end the run after an evaluation, by name: `_target_` and its arguments"
    )
    write_samples: bool = setting(True, "generate sample images or texts at each evaluation", on_resume=OnResume.same)
    early_stopping: EarlyStopping = field(default_factory=EarlyStopping)

    def __post_init__(self) -> None:
        """Convert an integer interval to text, since a recorded integer means steps counted anew in each epoch."""
        if type(self.interval) is int and self.interval > 0:
            object.__setattr__(self, "interval", str(self.interval))

    def check(self) -> Iterator[Violation]:
        """Check the interval, the parts (`evaluators` and `stop_rules`) and early stopping."""
        try:
            self._length()
        except ValueError as error:
            yield Violation("evaluation.interval", str(error))
        for key in ("evaluators", "stop_rules"):
            for name, node in getattr(self, key).items():
                if node is not None and (not isinstance(node, dict) or "_target_" not in node):
                    message = "must be a mapping with a _target_, or null"
                    yield Violation(f"evaluation.{key}.{name}", message)
                elif node is not None and not _are_names(node.get("metrics", [])):
                    message = f"is {as_text(node['metrics'])} but must be a list of names"
                    yield Violation(f"evaluation.{key}.{name}.metrics", message)
                elif node is not None and node.get("torchmetrics") and find_spec("torchmetrics") is None:
                    message = missing_message("torchmetrics", "torchmetrics")
                    yield Violation(f"evaluation.{key}.{name}.torchmetrics", message)
        stopping = self.early_stopping
        if stopping.patience is not None and stopping.metric is None:
            message = f"is null but patience is {stopping.patience}; name a metric"
            yield Violation("evaluation.early_stopping.metric", message)
        if stopping.patience is not None and self.interval is None:
            message = (
                f"is {stopping.patience} but evaluation.interval=null evaluates only at the end, when it is too late "
            )
            yield Violation(
                _PATIENCE, f"{message}to stop; set evaluation.interval, or evaluation.early_stopping.patience=null"
            )

    def check_patience(self, budget: Budget) -> Iterator[Violation]:
        """Check that the run has more evaluations before its end than `patience`, if patience counts evaluations.

        Raises:
            ValueError: see `interval_in`.
        """
        interval, stopping = self.interval_in(budget), self.early_stopping
        if stopping.patience is None or stopping.unit is PatienceUnit.epochs or not isinstance(interval, Interval):
            return
        # The first evaluation is the baseline, so it does not count.
        if (times := interval.times_before_end(budget)) <= stopping.patience:
            message = f"is {stopping.patience} evaluations after the first, but the run has only {times} before its end"
            remedy = "evaluate more often (evaluation.interval), lower it, or set it to null"
            yield Violation(_PATIENCE, f"{message}, so it never stops the run; {remedy}")

    def interval_in(self, budget: Budget) -> Interval | EpochInterval | None:
        """Return the interval in a run of this budget, or None to evaluate at the end only.

        Raises:
            ValueError: the interval is invalid, or it is a duration longer than the run.
        """
        length = self._length()
        if length is None:
            return None
        return (
            Interval.parse(str(self.interval), budget)
            if isinstance(length, Duration)
            else EpochInterval.of(length, budget)
        )

    def interval_unit(self) -> Unit | None:
        """Return the unit of an interval that is a duration; None for other intervals and invalid ones."""
        try:
            length = self._length()
        except ValueError:
            return None
        return length.unit if isinstance(length, Duration) else None

    def _length(self) -> Duration | int | float | None:
        """Parse the interval.

        Returns:
            A duration; or a number of steps (int) or a fraction (float) of an epoch, counted from the start of each
            epoch; or None.

        Raises:
            ValueError: a text is not a duration, or is a decimal without a unit; a number is not above 0, or is a
                fraction of an epoch above 1.
        """
        value = self.interval
        if isinstance(value, str):
            if (steps := parse_epoch_steps(value)) is not None:
                return steps
            duration = Duration.parse_positive(value)
            if duration.unit is Unit.fraction:
                raise ValueError(
                    f"is the string '{as_text(value)}', without a unit; write {float(value):g} without quotes for a "
                    f"fraction of an epoch, or '{as_text(value)} run' for a fraction of the run"
                )
            return duration
        if value is not None and value <= 0:
            raise ValueError(f"is {as_text(value)} but must be above 0")
        if value is not None and value > 1:
            text = as_text(value)
            raise ValueError(
                f"is {text}, a fraction of an epoch, which is at most 1.0; write '{text} epochs', or a "
                "whole number of steps"
            )
        return value


def recorded_interval(value: Any) -> Any:
    """Convert `evaluation.interval` of a run directory to the format of this version.

    An earlier version recorded an integer unchanged; it meant steps counted from the start of each epoch.
    """
    return f"{value} epoch_steps" if type(value) is int else value


def _are_names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value))
