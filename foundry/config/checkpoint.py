"""`checkpoint=`: what is kept of the model."""

from dataclasses import dataclass
from enum import Enum

from foundry.config.setting import setting


class SchedulerOnResume(Enum):
    """Whose learning-rate and weight-decay schedule a resumed run follows."""

    match = "match"
    config = "config"
    checkpoint = "checkpoint"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Sharded checkpoints in safetensors, readable from any number of processes."""

    save_final: bool = setting(True, "save the model at the end of the run")
    scheduler_on_resume: SchedulerOnResume = setting(
        SchedulerOnResume.match,
        "schedule of a resumed run: match: the configuration's, which must equal the checkpoint's; config; checkpoint",
        source="override_opt_param_scheduler, use_checkpoint_opt_param_scheduler",
    )
