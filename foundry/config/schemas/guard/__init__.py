"""`guard=`: the handling of non-finite losses and gradients, and of loss spikes."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from foundry.config.setting import setting
from foundry.core.errors import Violation

if TYPE_CHECKING:
    from foundry.config.environment import Launch
    from foundry.config.schemas.root import Config

_DEFAULT_MAX_SKIPS, _DEFAULT_WINDOW = 3, 128


class NonFinite(Enum):
    """Action if the loss or a gradient is NaN or infinite."""

    stop = "stop"
    skip = "skip"


class SpikeAction(Enum):
    """Action if the loss spikes."""

    skip = "skip"
    rollback = "rollback"


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Handling of non-finite values and loss spikes. A skipped update consumes its samples without other effects."""

    non_finite: NonFinite = setting(
        NonFinite.stop,
        "action if the loss or a gradient is NaN or infinite: stop the run, or skip the update with a warning",
    )
    max_skips: int = setting(
        _DEFAULT_MAX_SKIPS,
        "maximum number of updates skipped in a row, or of rollbacks to one checkpoint; one more ends the run",
        ge=1,
    )
    spike_zscore: float | None = setting(
        None,
        "robust z-score above which a loss is a spike; null: no spike detection; any other value makes the host wait "
        "for every loss",
        gt=0,
    )
    spike_window: int = setting(
        _DEFAULT_WINDOW,
        "number of accepted losses to compare a new loss with; detection starts when a quarter of them exist",
        ge=8,
        le=10**6,
    )
    spike_action: SpikeAction = setting(
        SpikeAction.skip,
        "action at a spike: skip the update, or rollback: return to the last checkpoint and skip the data of the spike",
    )

    @property
    def max_non_finite(self) -> int:
        """Maximum number of consecutive updates that may be skipped because of non-finite values."""
        return self.max_skips if self.non_finite is NonFinite.skip else 0

    def check(self) -> Iterator[Violation]:
        """Check that no field is set that the other fields make ineffective."""
        if self.spike_zscore is not None:
            return
        if self.spike_window != _DEFAULT_WINDOW:
            yield _idle("spike_window", str(self.spike_window))
        if self.spike_action is not SpikeAction.skip:
            yield _idle("spike_action", self.spike_action.name)
        if self.non_finite is NonFinite.stop and self.max_skips != _DEFAULT_MAX_SKIPS:
            message = f"is {self.max_skips} but nothing is skipped; set guard.non_finite=skip or guard.spike_zscore=6"
            yield Violation("guard.max_skips", message)

    def check_with(self, run: "Config", launch: "Launch") -> Iterator[Violation]:
        """Check that checkpoints are saved during the run if `spike_action` is rollback and spikes are detected."""
        goes_back = self.spike_zscore is not None and self.spike_action is SpikeAction.rollback
        if goes_back and run.checkpoint.interval is None and run.checkpoint.every_minutes is None:
            message = "is rollback but the run saves no checkpoints to return to; set checkpoint.interval or"
            yield Violation("guard.spike_action", f"{message} .every_minutes")


def _idle(name: str, value: str) -> Violation:
    return Violation(
        f"guard.{name}",
        f"is {value} but guard.spike_zscore is null, so no spikes are detected; set guard.spike_zscore=6",
    )
