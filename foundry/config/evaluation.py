"""`evaluation=`: when the model is measured on held-out data."""

from dataclasses import dataclass

from foundry.config.duration import Duration
from foundry.config.setting import setting


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Held-out loss and samples during the run and at its end."""

    interval: str | None = setting(
        "0.25",
        "duration between evaluations; null: only at the end",
        parse=Duration.parse_positive,
        source="val_check_interval",
    )
    max_samples: int | None = setting(
        None, "held-out samples per evaluation, the same on any number of ranks; null: all", ge=1
    )
    write_samples: bool = setting(True, "draw or continue samples at each evaluation")
