"""The objective's own loss and metrics on held-out data."""

import torch
from torch import nn

from foundry.config.metrics import declared_metrics
from foundry.data.loader import held_out_batches
from foundry.data.splits import DataSplits
from foundry.training.metric_sums import add_metrics, reduce_sums
from foundry.training.protocols import EvaluationContext, LossSum, Mean, Objective
from foundry.training.step import to_device

_LOSS = "loss"


class HeldOut:
    """Means over all valid held-out items of all ranks: the loss, and the objective's own metrics.

    Args:
        objective: gives the loss.
        data: its held-out samples are measured.
        per_gpu_batch_size: samples per forward pass.
        max_samples: held-out samples, the first ones; None: all.
    """

    def __init__(
        self, *, objective: Objective, data: DataSplits, per_gpu_batch_size: int, max_samples: int | None = None
    ) -> None:
        self._objective, self._data = objective, data
        self._per_gpu_batch_size, self._max_samples = per_gpu_batch_size, max_samples
        own = declared_metrics(objective)
        self.metrics = None if own is None else tuple(dict.fromkeys((_LOSS, *own)))

    def evaluate(self, model: nn.Module, context: EvaluationContext) -> dict[str, float]:
        """Measure the model; a metric that nothing was counted for is left out."""
        world, device = context.world, context.world.device
        batches = held_out_batches(
            self._data.validation,
            per_gpu_batch_size=self._per_gpu_batch_size,
            dp_rank=world.dp_rank,
            dp_size=world.dp_size,
            max_samples=self._max_samples,
        )
        count, metrics = 0, dict[str, Mean]()
        loss = torch.zeros((), dtype=torch.float64, device=device)
        for microbatch in batches:
            context.beat("evaluating")
            num_valid = self._objective.num_valid(microbatch)
            count += num_valid
            with context.autocast():
                part = self._objective.loss(model, to_device(microbatch, device))
            loss += part.loss
            add_metrics(metrics, {name: Mean(m.sum.double(), m.count) for name, m in part.metrics.items()}, num_valid)
        # The loss and its count are one metric of several, reduced with the others; none of them replaces it.
        named = {_LOSS: Mean(loss, count)}
        total = reduce_sums(LossSum(loss, {**named, **metrics, **named}), self.metrics, world)
        means = {name: mean.item() for name, mean in total.metrics.items()}
        return {name: value for name, value in means.items() if value is not None}
