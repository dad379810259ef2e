"""Settings of `hydra/sweeper/pruner=asha`: asynchronous successive halving."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from foundry.config.schemas.launcher_base import PLUGINS
from foundry.config.setting import check_fields, setting
from foundry.core.duration import Duration, Unit
from foundry.core.errors import ConfigError, Violation, first_line

KEY = "hydra.sweeper.pruner"
_TARGET = f"{PLUGINS}.ASHA"


@dataclass(frozen=True, kw_only=True)
class ASHA:
    """Asynchronous successive halving (Li et al. 2020, https://arxiv.org/abs/1810.05934).

    Each job pauses at rungs. When it is among the best 1/reduction_factor of the jobs that have reached its rung, it
    continues until the next rung. Each rung is reduction_factor times as long as the previous one.
    """

    _target_: str = _TARGET
    min_resource: str = setting(
        "0.12 run",
        "training before the first rung: steps, or a duration such as 5M tokens or 0.12 run",
        parse=Duration.parse_positive,
    )
    reduction_factor: int = setting(3, "1/reduction_factor of the jobs at a rung continue", ge=2, le=1000)
    max_rungs: int | None = setting(
        None, "maximum number of rungs; null: as many as begin before the end of the run", ge=1, le=60
    )

    @classmethod
    def find(cls, node: Mapping[str, Any] | None) -> "ASHA | None":
        """Return the settings in the node of a pruner; None for another pruner, or none.

        Raises:
            ConfigError: a setting is unknown or invalid.
        """
        if node is None or node.get("_target_") != _TARGET:
            return None
        try:
            settings = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), dict(node)))
        except OmegaConfBaseException as error:
            raise ConfigError(Violation(f"{KEY}.{error.full_key}", f"is invalid: {first_line(str(error))}")) from None
        assert isinstance(settings, cls)
        if violations := list(check_fields(settings, KEY)):
            raise ConfigError(violations)
        return settings

    def length(self, rung: int) -> Duration | None:
        """Return the length of training at a rung, counted from 1; None after the last rung.

        A length that is not a fraction of the run may be longer than the run.
        """
        length = Duration.parse(self.min_resource).times(self.reduction_factor ** (rung - 1))
        is_fraction = length.unit in (Unit.run, Unit.fraction)
        is_after_last = self.max_rungs is not None and rung > self.max_rungs
        return None if is_after_last or (is_fraction and length.value >= 1) else length
