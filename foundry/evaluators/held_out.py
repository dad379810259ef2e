"""Evaluator of the objective's loss and metrics on the validation split."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from foundry.config.configured import configured_by
from foundry.config.metrics import declared_metrics
from foundry.config.schemas.built_in_evaluators import HeldOut as HeldOutSettings
from foundry.core.errors import ConfigError, Violation
from foundry.core.protocols import EvaluationContext, LossSum, Mean, Objective
from foundry.data.loader import held_out_batches
from foundry.data.splits import DataSplits
from foundry.evaluators.torch_metrics import TorchMetrics
from foundry.training.metric_sums import add_metrics, read_means, reduce_sums
from foundry.training.step import to_device

if TYPE_CHECKING:
    from torchmetrics import Metric

_LOSS = "loss"


class HeldOut:
    """Means of the loss and of the objective's metrics over the evaluated samples of the validation split on all ranks.

    Args:
        settings: number of samples, and microbatch size.
        objective: the loss.
        data: data with the validation split.
        torchmetrics: additional metrics by name, which receive the results of the objective's `predict`, at the cost of
            a second forward pass.

    Raises:
        ConfigError: there are `torchmetrics` but the objective has no `predict`, or one is not a torchmetrics metric.
    """

    @configured_by(HeldOutSettings)
    def __init__(
        self,
        settings: HeldOutSettings,
        *,
        objective: Objective,
        data: DataSplits,
        torchmetrics: "Mapping[str, Metric] | None" = None,
    ) -> None:
        self.settings, self._objective, self._data = settings, objective, data
        declared = declared_metrics(objective)
        self._declared_metrics = None if declared is None else tuple(dict.fromkeys((_LOSS, *declared)))
        self.metrics = None if torchmetrics else self._declared_metrics
        key = "evaluation.evaluators.held_out.torchmetrics"
        if torchmetrics and objective.predict is None:
            message = f"is given but objective {type(objective).__name__} has no predict() to compute its inputs"
            raise ConfigError(Violation(key, message))
        self._torchmetrics = TorchMetrics(torchmetrics, key) if torchmetrics else None

    def evaluate(self, model: nn.Module, context: EvaluationContext) -> dict[str, float]:
        """Evaluate the model; metrics whose count is 0 are omitted."""
        world, device = context.world, context.world.device
        batches = held_out_batches(
            self._data.validation,
            per_gpu_batch_size=self.settings.per_gpu_batch_size,
            dp_rank=world.dp_rank,
            dp_size=world.dp_size,
            max_samples=self.settings.max_samples,
        )
        if self._torchmetrics is not None:
            self._torchmetrics.start(device)
        count, metrics = 0, dict[str, Mean]()
        loss = torch.zeros((), dtype=torch.float64, device=device)
        for microbatch in batches:
            context.heartbeat("evaluating")
            num_valid = self._objective.num_valid(microbatch)
            count += num_valid
            on_device = to_device(microbatch, device)
            with context.autocast():
                part = self._objective.loss(model, on_device)
            loss += part.loss
            add_metrics(metrics, {name: Mean(m.sum.double(), m.count) for name, m in part.metrics.items()}, num_valid)
            if self._torchmetrics is not None:
                assert self._objective.predict is not None
                with context.autocast():
                    predictions, targets = self._objective.predict(model, on_device)
                self._torchmetrics.add(predictions.float(), targets)
        # The loss and its count are reduced with the metrics; an objective's metric "loss" does not replace this loss.
        loss_metric = {_LOSS: Mean(loss, count)}
        total = reduce_sums(LossSum(loss, {**loss_metric, **metrics, **loss_metric}), self._declared_metrics, world)
        means, _ = read_means(total.metrics)
        return means if self._torchmetrics is None else means | self._torchmetrics.measure(world)
