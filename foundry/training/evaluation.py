"""Evaluation of the model during a run."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foundry.config.metrics import val_metric_name
from foundry.core.errors import ConfigError, Violation, as_text
from foundry.core.protocols import EvaluationContext, Evaluator, RunContext


@dataclass(kw_only=True)
class Evaluation:
    """Runs all evaluators on the model; a collective operation that every rank must call.

    Attributes:
        model: the wrapped model.
        evaluators: evaluators by their names in the configuration, in execution order.
        run: context of the run; the evaluators' contexts are built from it.
        folder: output folder of rank 0 for files such as samples.
    """

    model: nn.Module
    evaluators: Mapping[str, Evaluator]
    run: RunContext
    folder: Path

    @torch.no_grad()
    def measure(self, step: int, heartbeat: Callable[[str], None]) -> tuple[dict[str, float], list[Path]]:
        """Run the evaluators in eval mode; return metrics by their names in metrics.jsonl (`val_…`) and written files.

        Afterwards the model is in its previous mode (train or eval) again.

        Args:
            step: optimizer steps taken.
            heartbeat: heartbeat, called with the current activity.

        Raises:
            ConfigError: an evaluator returns no mapping of names to numbers, or two return a metric of the same name.
        """
        context = EvaluationContext.of(self.run, step=step, folder=self.folder, heartbeat=heartbeat)
        metrics, was_training = dict[str, float](), self.model.training
        self.model.eval()
        try:
            for name, evaluator in self.evaluators.items():
                heartbeat("evaluating")
                for metric, value in _require_numbers(evaluator.evaluate(self.model, context), name, evaluator):
                    if (full_name := val_metric_name(metric)) in metrics:
                        message = f"measures {full_name}, which an earlier evaluator also measures; rename it"
                        raise ConfigError(Violation(f"evaluation.evaluators.{name}", message))
                    metrics[full_name] = value
        finally:
            self.model.train(was_training)
        return metrics, context.files

    def close(self) -> None:
        """Close the evaluators that have a `close` method."""
        for evaluator in self.evaluators.values():
            if hasattr(evaluator, "close"):
                evaluator.close()


def _require_numbers(result: Any, name: str, evaluator: Evaluator) -> Iterator[tuple[str, float]]:
    """Yield the metrics in the result of an evaluator.

    Raises:
        ConfigError: the result is no mapping, or a value is not a number.
    """
    problem = None if isinstance(result, Mapping) else f"an object of type {type(result).__name__}"
    for metric, value in result.items() if problem is None else ():
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            problem = f"{as_text(value)} for {metric}"
            break
        yield metric, number
    if problem is not None:
        message = (
            f"builds {type(evaluator).__name__}, whose evaluate() returns {problem} but must return a mapping of names "
            "to numbers"
        )
        raise ConfigError(Violation(f"evaluation.evaluators.{name}._target_", message))
