"""Decisions of asynchronous successive halving (Li et al. 2020, https://arxiv.org/abs/1810.05934, algorithm 2)."""

import math
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Climb:
    """Rungs that a trial has reached.

    Attributes:
        trial: number of the trial.
        values: value of the metric at each rung that the trial has reached, in order; it may not be finite.
        is_paused: whether the trial waits at its last rung; otherwise it trains, or has ended.
        has_failed: whether the trial has ended without a result; it counts as the worst at the next rung.
    """

    trial: int
    values: tuple[float, ...]
    is_paused: bool = False
    has_failed: bool = False


def next_promotion(climbs: Collection[Climb], *, reduction_factor: int, minimize: bool) -> int | None:
    """Return the number of the paused trial to continue next; None if all paused trials have to wait.

    The trial is the best paused one among the best 1/reduction_factor of its rung. Higher rungs come first. Among equal
    values the trial that was proposed first counts as better.

    Args:
        climbs: the trials of the search; their order has no influence.
        reduction_factor: 1/reduction_factor of the trials at a rung continue, rounded down.
        minimize: whether lower values are better.
    """
    sign = 1 if minimize else -1
    for rung in range(max((len(climb.values) for climb in climbs), default=0), 0, -1):
        reached = [climb for climb in climbs if len(climb.values) >= rung]
        failed = sum(climb.has_failed and len(climb.values) == rung - 1 for climb in climbs)
        comparable = [climb for climb in reached if math.isfinite(climb.values[rung - 1])]
        comparable.sort(key=lambda climb: (sign * climb.values[rung - 1], climb.trial))
        for climb in comparable[: (len(reached) + failed) // reduction_factor]:
            if climb.is_paused and len(climb.values) == rung:
                return climb.trial
    return None
