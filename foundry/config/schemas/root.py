"""The whole configuration of a run."""

from dataclasses import dataclass, field, fields
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

from foundry.config.schemas.checkpoint import Checkpoint
from foundry.config.schemas.distributed import Distributed
from foundry.config.schemas.evaluation import Evaluation
from foundry.config.schemas.guard import Guard
from foundry.config.schemas.hparams import HParams
from foundry.config.schemas.precision import Precision
from foundry.config.schemas.tracking import Tracking


@dataclass(frozen=True, kw_only=True)
class Config:
    """What composition yields and `train` takes.

    The groups typed `Any` hold parts with a `_target_`: one of foundry's schemas, or a user's own mapping.
    """

    hparams: HParams = field(default_factory=HParams)
    optimizer: Any = MISSING
    scheduler: Any = MISSING
    precision: Precision = field(default_factory=Precision)
    distributed: Distributed = field(default_factory=Distributed)
    model: Any = MISSING
    data: Any = MISSING
    objective: Any = MISSING
    evaluation: Evaluation = field(default_factory=Evaluation)
    guard: Guard = field(default_factory=Guard)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    tracking: Tracking = field(default_factory=Tracking)


def to_config(composed: DictConfig) -> Config:
    """The composed configuration as frozen dataclasses, everything resolved; a user's own part as plain containers.

    Raises:
        omegaconf.errors.OmegaConfBaseException: a value is missing or leads nowhere.
    """
    # Group by group, since the composed configuration also holds Hydra's own.
    groups: dict[str, Any] = {item.name: OmegaConf.to_object(composed[item.name]) for item in fields(Config)}
    return Config(**groups)
