"""Root schema: the configuration of a run, with one field for each config group."""

from dataclasses import dataclass, fields
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

from foundry.config.schemas.checkpoint import Checkpoint
from foundry.config.schemas.device import Device
from foundry.config.schemas.distributed import Distributed
from foundry.config.schemas.environment import NoEnvironment
from foundry.config.schemas.evaluation import Evaluation
from foundry.config.schemas.guard import Guard
from foundry.config.schemas.hparams import HParams
from foundry.config.schemas.peft import Peft
from foundry.config.schemas.precision import Precision
from foundry.config.schemas.simulator import NoSimulator
from foundry.config.schemas.tracking import Tracking
from foundry.config.setting import OnResume, group


@dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration of a run, the result of composition and the argument of `train`.

    Groups of type `Any` hold parts with a `_target_`: one of foundry's schemas, or a mapping for a user-defined part.
    """

    hparams: HParams = group(HParams)
    optimizer: Any = group(MISSING, given=("model", "lr"), offered=("precision",))
    scheduler: Any = group(MISSING, OnResume.schedule, given=("max_lr", "budget"))
    precision: Precision = group(Precision)
    device: Device = group(Device, OnResume.same)
    distributed: Distributed = group(Distributed, OnResume.same)
    model: Any = group(MISSING, given=())
    peft: Peft = group(Peft)
    data: Any = group(MISSING, given=("seed",), offered=("simulator", "simulator_settings"))
    objective: Any = group(MISSING, given=(), offered=("world", "tokenizer", "has_adapters"))
    environment: Any = group(NoEnvironment, given=())
    simulator: Any = group(NoSimulator, given=())
    evaluation: Evaluation = group(Evaluation, OnResume.allowed)
    guard: Guard = group(Guard, OnResume.allowed)
    checkpoint: Checkpoint = group(Checkpoint, OnResume.same)
    tracking: Tracking = group(Tracking, OnResume.same)


def to_config(composed: DictConfig) -> Config:
    """Convert the composed configuration to frozen dataclasses, with all interpolations resolved.

    User-defined parts become plain containers.

    Raises:
        omegaconf.errors.OmegaConfBaseException: a value is missing, or an interpolation cannot be resolved.
    """
    # Group by group, because the composed configuration also contains Hydra's group.
    groups: dict[str, Any] = {item.name: OmegaConf.to_object(composed[item.name]) for item in fields(Config)}
    return Config(**groups)
