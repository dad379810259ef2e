"""Measuring the model during a run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from foundry.config.metrics import val_metric_name
from foundry.core.errors import ConfigError, Violation
from foundry.core.protocols import EvaluationContext, Evaluator, RunContext


@dataclass(kw_only=True)
class Evaluation:
    """Has the evaluators measure the model as it is; every rank calls it together with the others.

    Attributes:
        model: the model as it was wrapped.
        evaluators: by their names in the configuration, in the order in which they measure.
        run: context of the run, from which evaluators get theirs.
        folder: where rank 0 writes what a person is to look at.
    """

    model: nn.Module
    evaluators: Mapping[str, Evaluator]
    run: RunContext
    folder: Path

    @torch.no_grad()
    def measure(self, step: int, beat: Callable[[str], None]) -> tuple[dict[str, float], list[Path]]:
        """Metrics by their names in metrics.jsonl, `val_…`, and the files written; the model is in evaluation mode.

        Args:
            step: optimizer steps taken.
            beat: tells a watchdog what is being done.

        Raises:
            ConfigError: two evaluators measure something of the same name.
        """
        context = EvaluationContext.of(self.run, step=step, folder=self.folder, beat=beat)
        metrics, was_training = dict[str, float](), self.model.training
        self.model.eval()
        try:
            for name, evaluator in self.evaluators.items():
                beat("evaluating")
                for metric, value in evaluator.evaluate(self.model, context).items():
                    if (measured := val_metric_name(metric)) in metrics:
                        message = f"measures {measured}, which an evaluator before it does; give it another name"
                        raise ConfigError(Violation(f"evaluation.evaluators.{name}", message))
                    metrics[measured] = float(value)
        finally:
            self.model.train(was_training)
        return metrics, context.files

    def close(self) -> None:
        """Close the evaluators that hold something."""
        for evaluator in self.evaluators.values():
            if hasattr(evaluator, "close"):
                evaluator.close()
