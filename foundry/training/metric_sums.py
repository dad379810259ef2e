"""Sums of an objective's loss and metrics over microbatches and ranks."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from foundry.core.errors import ConfigError, Violation
from foundry.core.protocols import LossSum, Mean
from foundry.parallel.process_group import World


def add_metrics(totals: dict[str, Mean], metrics: Mapping[str, Mean | Tensor], num_valid: int) -> None:
    """Add a microbatch's metrics to `totals`, in place and on the device.

    Args:
        totals: sums over the previous microbatches.
        metrics: metrics of this microbatch; a bare tensor is a sum over the valid items.
        num_valid: number of valid items, used as the count of metrics that have no count.
    """
    for name, metric in metrics.items():
        mean = Mean(metric) if isinstance(metric, Tensor) else metric
        value, count = mean.sum.detach(), num_valid if mean.count is None else mean.count
        if name in totals:
            previous = totals[name]
            assert previous.count is not None
            value, count = previous.sum + value, previous.count + count
        totals[name] = Mean(value, count)


def reduce_sums(sums: LossSum, names: Iterable[str] | None, world: World) -> LossSum:
    """Sum loss, metrics and counts over the data-parallel ranks in one collective; one rank returns them unchanged.

    Args:
        sums: sums of this rank.
        names: names of the objective's metrics, even if a rank has no value for some; None if every rank has the
            metrics of `sums`.
        world: process group of the run.

    Raises:
        ConfigError: `sums` has a metric that the objective's `metrics` does not name.
    """
    metric_names = list(sums.metrics) if names is None else list(names)
    if unnamed := [name for name in sums.metrics if name not in metric_names]:
        message = f"returns the metric {unnamed[0]}, which its `metrics` does not list"
        raise ConfigError(Violation("objective", message))
    if world.dp_size == 1:
        return sums
    empty = Mean(torch.zeros_like(sums.loss), 0)
    means = [sums.metrics.get(name, empty) for name in metric_names]
    # A fill, unlike a copy from the host, does not synchronize with the device.
    counts = [m.count if isinstance(m.count, Tensor) else torch.full_like(sums.loss, m.count or 0) for m in means]
    total = world.dp_sum(torch.stack([sums.loss, *(mean.sum for mean in means), *counts]))
    size = len(metric_names)
    reduced = zip(metric_names, total[1 : 1 + size], total[1 + size :], strict=True)
    return LossSum(total[0], {name: Mean(value, count) for name, value, count in reduced})


def read_means(metrics: Mapping[str, Mean], *numbers: Tensor) -> tuple[dict[str, float], list[float]]:
    """Read means and further numbers with a single device synchronization.

    Args:
        metrics: sums with known counts.
        numbers: further tensors of one element each.

    Returns:
        The means by metric name, without metrics whose count is 0; and the values of `numbers`.
    """
    counted_metrics = {name: mean for name, mean in metrics.items() if isinstance(mean.count, Tensor) or mean.count}
    quotients = [mean.sum / mean.count for mean in counted_metrics.values() if mean.count is not None]
    counts = [mean.count for mean in counted_metrics.values() if isinstance(mean.count, Tensor)]
    values = iter(_read([*numbers, *quotients, *counts]))
    read = [next(values) for _ in numbers]
    means = {name: next(values) for name in counted_metrics}
    empty = {name for name, mean in counted_metrics.items() if isinstance(mean.count, Tensor) and next(values) <= 0}
    return {name: value for name, value in means.items() if name not in empty}, read


def _read(numbers: Sequence[Tensor]) -> list[float]:
    """Return one-element tensors as floats, with one copy per device."""
    places: dict[torch.device, list[int]] = {}
    for place, number in enumerate(numbers):
        places.setdefault(number.device, []).append(place)
    values = [0.0] * len(numbers)
    for indices in places.values():
        stacked = torch.stack([numbers[place].detach().reshape(()).double() for place in indices])
        for place, value in zip(indices, stacked.cpu().tolist(), strict=True):
            values[place] = value
    return values
