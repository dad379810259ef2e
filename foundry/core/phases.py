"""Phases of a schedule, converted from the user's durations to samples of a run."""

from dataclasses import dataclass
from typing import Self

from foundry.core.duration import Budget, Duration


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Lengths of a schedule's phases in samples; they may be fractional.

    Attributes:
        warmup: length of the linear warmup.
        horizon: samples until the learning rate reaches its floor, warmup included.
        decay: length of the decay that ends at the horizon; None if the schedule has no separate decay phase.
        weight_decay_horizon: samples until the weight decay reaches its final value.
        is_clamped: whether the warmup is shorter than the user set it.
    """

    warmup: float
    horizon: float
    decay: float | None
    weight_decay_horizon: float
    is_clamped: bool = False

    @classmethod
    def resolve(
        cls,
        budget: Budget,
        *,
        warmup: str,
        horizon: str,
        decay: str | None,
        weight_decay_horizon: str | None,
        clamp_warmup: bool = False,
    ) -> Self:
        """Convert durations to samples; fractions of `warmup` and `decay` are relative to the horizon.

        Megatron-LM defines these fractions in the same way. So a run that is shorter than its horizon follows the first
        part of the whole schedule, including the weight decay, whose horizon defaults to the longer of run and horizon.
        A clamped warmup ends before the decay and at least one step before the horizon.

        Raises:
            ValueError: a duration counts tokens and the data has no tokens.
        """
        end = Duration.parse(horizon).samples(budget)
        wd_end = (
            max(end, budget.total_samples)
            if weight_decay_horizon is None
            else Duration.parse(weight_decay_horizon).samples(budget)
        )
        length = Duration.parse(warmup).samples(budget, reference=end)
        decaying = None if decay is None else Duration.parse(decay).samples(budget, reference=end, end=end)
        most = end - max(budget.batch_sizes.samples_before(end, 1), decaying or 0.0)
        is_clamped = clamp_warmup and length > most
        return cls(
            warmup=max(most, 0.0) if is_clamped else length,
            horizon=end,
            decay=decaying,
            weight_decay_horizon=wd_end,
            is_clamped=is_clamped,
        )
