"""Adding up an objective's loss and metrics over microbatches and ranks."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from foundry.config.errors import ConfigError, Violation
from foundry.parallel.process_group import World
from foundry.training.protocols import LossSum, Mean


def add_metrics(totals: dict[str, Mean], metrics: Mapping[str, Mean | Tensor], num_valid: int) -> None:
    """Add a microbatch's metrics to `totals`, in place and on the device.

    Args:
        totals: of the microbatches before.
        metrics: of this microbatch; a bare tensor is a sum over the valid items.
        num_valid: its valid items, the count of a metric without its own.
    """
    for name, metric in metrics.items():
        mean = Mean(metric) if isinstance(metric, Tensor) else metric
        value, count = mean.sum.detach(), num_valid if mean.count is None else mean.count
        if name in totals:
            before = totals[name]
            assert before.count is not None
            value, count = before.sum + value, before.count + count
        totals[name] = Mean(value, count)


def reduce_sums(sums: LossSum, names: Iterable[str] | None, world: World) -> LossSum:
    """Add up sums and counts over the ranks in one collective; on one process they are the sums already.

    Args:
        sums: of this rank.
        names: of the objective's metrics, any of which a rank may lack; None: every rank has those in `sums`.
        world: this rank and the others.

    Raises:
        ConfigError: the objective has a metric that its `metrics` does not name.
    """
    known = list(sums.metrics) if names is None else list(names)
    if unnamed := [name for name in sums.metrics if name not in known]:
        message = f"returns the metric {unnamed[0]}, which its `metrics` does not name"
        raise ConfigError(Violation("objective", message))
    if world.dp_size == 1:
        return sums
    nothing = Mean(torch.zeros_like(sums.loss), 0)
    means = [sums.metrics.get(name, nothing) for name in known]
    # A fill, unlike a copy from the host, does not wait for the device.
    counts = [m.count if isinstance(m.count, Tensor) else torch.full_like(sums.loss, m.count or 0) for m in means]
    total = world.dp_sum(torch.stack([sums.loss, *(mean.sum for mean in means), *counts]))
    size = len(known)
    reduced = zip(known, total[1 : 1 + size], total[1 + size :], strict=True)
    return LossSum(total[0], {name: Mean(value, count) for name, value, count in reduced})
