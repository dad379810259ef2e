"""Choice of the schedule of a resumed run: from the configuration or from the checkpoint."""

from collections.abc import Iterator, Mapping
from typing import Any

from foundry.config.schemas.checkpoint import SchedulerOnResume
from foundry.core.errors import ConfigError, Violation
from foundry.core.protocols import Schedule
from foundry.optim.schedules import from_state

_IN_SAMPLES = ("warmup", "horizon", "decay", "weight_decay_curve.horizon", "momentum_warmup.samples")
_KEYS = {
    "momentum_warmup.start": "optimizer.momentum_warmup_start",
    "momentum_warmup.end": "optimizer.momentum",
    "momentum_warmup.samples": "optimizer.momentum_warmup",
}
"""Config keys of the fields that are not set in `scheduler`."""
_REMEDIES = {
    "horizon": "scheduler.horizon (keep it to extend the run), ",
    "max_lr": "hparams.lr, ",
    "momentum_warmup.samples": "optimizer.momentum_warmup and scheduler.horizon, ",
}


def reconcile(schedule: Schedule, saved: Mapping[str, Any], mode: SchedulerOnResume) -> Schedule:
    """Return the configured schedule or the one in the checkpoint, depending on the mode.

    No other state carries schedule values over a resume: learning rate, weight decay and momentum are pure functions of
    the number of consumed samples, and their values in parameter groups are overwritten before every update.
    (Megatron-LM keeps the checkpoint's bounds in the groups, loses WSD's decay, and adds the saved count to its own.)

    Args:
        schedule: the configured schedule.
        saved: `state_dict` of the schedule in the checkpoint.
        mode: `match` rejects any difference; `config` and `checkpoint` select one of the two.

    Raises:
        ConfigError: mode is `match` and fields differ, with one line per field; or mode is `checkpoint` and the saved
            state is of an unknown schedule.
    """
    if mode is SchedulerOnResume.config:
        return schedule
    if mode is SchedulerOnResume.checkpoint:
        try:
            return from_state(dict(saved))
        except ValueError as error:
            raise ConfigError(Violation("checkpoint.scheduler_on_resume", f"is checkpoint but {error}")) from None
    current, previous = dict(_flat(schedule.state_dict())), dict(_flat(saved))
    differing = [
        Violation(
            _KEYS.get(name, f"scheduler.{name}"),
            f"is {_format(name, current)} but the checkpoint was trained with {_format(name, previous)}; resume with "
            f"the same {_REMEDIES.get(name, '')}or set checkpoint.scheduler_on_resume to config or checkpoint",
        )
        for name in {**current, **previous}
        if current.get(name) != previous.get(name)
    ]
    if differing:
        raise ConfigError(differing)
    return schedule


def _flat(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield prefix + name, value


def _format(name: str, state: Mapping[str, Any]) -> str:
    value = state.get(name)
    return "not set" if value is None else f"{value} samples" if name in _IN_SAMPLES else str(value)
