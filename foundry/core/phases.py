"""The phases of a schedule, from the durations a user gives to samples of this run."""

from dataclasses import dataclass
from typing import Self

from foundry.core.duration import Budget, Duration


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Lengths in samples; they may be fractional.

    Attributes:
        warmup: of the linear warm-up.
        horizon: where the learning rate has reached its floor, warm-up included.
        decay: of the decay that ends at the horizon; None where the schedule has no such phase.
        weight_decay_horizon: where the weight decay has reached its last value.
        is_clamped: whether the warm-up is shorter than it was given.
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
        """Read durations; a fraction of `warmup` and `decay` is one of the horizon, as Megatron-LM has it.

        A run cut short below its horizon therefore keeps the whole schedule, the weight decay's too, whose horizon is
        the longer of run and horizon unless it is given. A warm-up that is clamped leaves the horizon its last step.

        Raises:
            ValueError: a duration counts tokens and the data has none.
        """
        end = Duration.parse(horizon).samples(budget)
        wd_end = (
            max(end, budget.total_samples)
            if weight_decay_horizon is None
            else Duration.parse(weight_decay_horizon).samples(budget)
        )
        length = Duration.parse(warmup).samples(budget, whole=end)
        decaying = None if decay is None else Duration.parse(decay).samples(budget, whole=end, end=end)
        most = end - max(budget.batch_sizes.samples_before(end, 1), decaying or 0.0)
        is_clamped = clamp_warmup and length > most
        return cls(
            warmup=max(most, 0.0) if is_clamped else length,
            horizon=end,
            decay=decaying,
            weight_decay_horizon=wd_end,
            is_clamped=is_clamped,
        )
