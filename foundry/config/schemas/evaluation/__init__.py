"""`evaluation=`: when the model is measured on held-out data, and when that ends the run."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from importlib.util import find_spec
from typing import Any, ClassVar

from foundry.config.duration import Budget, Duration, EpochInterval, Interval, Unit
from foundry.config.errors import Violation, shown
from foundry.config.packages import missing_message
from foundry.config.setting import OnResume, setting


class PatienceUnit(Enum):
    """What the patience of early stopping counts."""

    evaluations = "evaluations"
    epochs = "epochs"


class Mode(Enum):
    """Which values of a metric are better."""

    min = "min"
    max = "max"


class Direction(Enum):
    """The same for a whole run or sweep."""

    minimize = "minimize"
    maximize = "maximize"


def _default_evaluators() -> dict[str, Any]:
    return {"held_out": {"_target_": "foundry.evaluators.held_out.HeldOut"}}


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Ends the run when a held-out metric no longer improves; one that is not finite ends it at once."""

    patience: int | None = setting(
        None,
        "units without improvement after which the run stops; null: never",
        ge=1,
    )
    unit: PatienceUnit = setting(
        PatienceUnit.epochs, "what patience counts; an epoch is that in which the evaluated step began"
    )
    min_delta: float = setting(0.001, "a metric must improve on the best by more than this", ge=0)
    metric: str | None = setting("${evaluation.metric}", "name of the metric as in metrics.jsonl")
    mode: Mode = setting("${mode_of:${.metric}}", "whether lower or higher values are better")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is measured during the run and at its end, and what follows from it."""

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
        "between evaluations: a whole number of batches, or a fraction of an epoch, both counted anew in each epoch; "
        'or a duration as text, such as "0.25 run"; null: only at the end',
    )
    max_samples: int | None = setting(
        None,
        "held-out samples per evaluation, the same on any number of ranks; null: all",
        ge=1,
        le=10**15,
    )
    evaluators: dict[str, Any] = setting(
        _default_evaluators,
        "what measures the model, by a name: `_target_`, arguments and, if wanted, `metrics`, the names of what it "
        "measures; null leaves one out, as evaluation.evaluators.held_out=null the held-out loss",
    )
    metric: str | None = setting(
        "val_loss",
        "by which the run is judged, as in metrics.jsonl: best checkpoint, early stopping, sweeps and result.json's "
        "metric follow unless they name their own; null: by none",
    )
    direction: Direction = setting(Direction.minimize, "whether less or more of the metric is better")
    stop_rules: dict[str, Any] = setting(
        dict, "what else may end the run after an evaluation, by a name: `_target_` and arguments"
    )
    write_samples: bool = setting(True, "draw or continue samples at each evaluation", on_resume=OnResume.same)
    early_stopping: EarlyStopping = field(default_factory=EarlyStopping)

    def check(self) -> Iterator[Violation]:
        """Say why the interval is none, and what is no part."""
        try:
            self._duration()
        except ValueError as error:
            yield Violation("evaluation.interval", str(error))
        for key in ("evaluators", "stop_rules"):
            for name, node in getattr(self, key).items():
                if node is not None and (not isinstance(node, dict) or "_target_" not in node):
                    message = "must be a mapping with a _target_; null leaves it out"
                    yield Violation(f"evaluation.{key}.{name}", message)
                elif node is not None and not _are_names(node.get("metrics", [])):
                    message = f"is {shown(node['metrics'])} but must be a list of names"
                    yield Violation(f"evaluation.{key}.{name}.metrics", message)
                elif node is not None and node.get("torchmetrics") and find_spec("torchmetrics") is None:
                    message = missing_message("torchmetrics", "torchmetrics")
                    yield Violation(f"evaluation.{key}.{name}.torchmetrics", message)
        stopping = self.early_stopping
        if stopping.patience is not None and stopping.metric is None:
            message = f"is null but patience is {stopping.patience}; name a metric"
            yield Violation("evaluation.early_stopping.metric", message)

    def interval_in(self, budget: Budget) -> Interval | EpochInterval | None:
        """The interval in a run of this budget; None: only at the end.

        Raises:
            ValueError: it is none, or longer than the run.
        """
        if self.interval is None:
            return None
        if self._duration() is not None:
            return Interval.parse(str(self.interval), budget)
        assert not isinstance(self.interval, str)
        return EpochInterval.of(self.interval, budget)

    def interval_unit(self) -> Unit | None:
        """What the interval counts; None: there is none, or it cannot be read."""
        try:
            duration = self._duration()
        except ValueError:
            return None
        if duration is not None:
            return duration.unit
        # Batches of an epoch are steps; a fraction of an epoch needs the data.
        return {int: Unit.steps, float: Unit.epochs}.get(type(self.interval))

    def _duration(self) -> Duration | None:
        """The duration that a text is; None for a number.

        Raises:
            ValueError: a text is none, or a bare decimal; a number is not above 0, or a fraction of an epoch above 1.
        """
        text = self.interval
        if isinstance(text, str):
            duration = Duration.parse_positive(text)
            if duration.unit is Unit.fraction:
                raise ValueError(
                    f"is the text '{shown(text)}': of what? {float(text):g} without quotes is a fraction of an epoch, "
                    f"'{shown(text)} run' one of the run"
                )
            return duration
        if text is not None and text <= 0:
            raise ValueError(f"is {shown(text)} but must be above 0")
        if isinstance(text, float) and text > 1:
            raise ValueError(
                f"is {shown(text)}, a fraction of an epoch, which is at most 1.0; write '{shown(text)} epochs', or a "
                "whole number of batches"
            )
        return None


def _are_names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value))
