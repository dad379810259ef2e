"""Which schedule a resumed run follows: the configuration's or the checkpoint's."""

from collections.abc import Iterator, Mapping
from typing import Any

from foundry.config.schemas.checkpoint import SchedulerOnResume
from foundry.core.errors import ConfigError, Violation
from foundry.core.protocols import Schedule
from foundry.optim.schedules import from_state

_IN_SAMPLES = ("warmup", "horizon", "decay", "weight_decay_curve.horizon")
_REMEDIES = {
    "horizon": "scheduler.horizon (which a run made longer keeps), ",
    "max_lr": "hparams.lr, ",
}


def reconcile(schedule: Schedule, saved: Mapping[str, Any], mode: SchedulerOnResume) -> Schedule:
    """Choose between the configured schedule and the one that a checkpoint was trained with.

    Nothing else carries schedule values over a resume: the clock counts samples, both curves are pure functions of it,
    and what parameter groups held is set anew before every update. (Megatron-LM leaves the checkpoint's bounds in the
    groups, forgets WSD's decay, and adds the saved count to its own.)

    Args:
        schedule: as configured.
        saved: the `state_dict` of the one in the checkpoint.
        mode: match refuses any difference; config and checkpoint take that side.

    Raises:
        ConfigError: under match, with a line for every field that differs.
    """
    if mode is SchedulerOnResume.config:
        return schedule
    if mode is SchedulerOnResume.checkpoint:
        try:
            return from_state(dict(saved))
        except ValueError as error:
            raise ConfigError(Violation("checkpoint.scheduler_on_resume", f"is checkpoint but {error}")) from None
    here, there = dict(_flat(schedule.state_dict())), dict(_flat(saved))
    differing = [
        Violation(
            f"scheduler.{name}",
            f"is {_shown(name, here)} but the checkpoint was trained with {_shown(name, there)}; resume with the same "
            f"{_REMEDIES.get(name, '')}or set checkpoint.scheduler_on_resume to config or checkpoint",
        )
        for name in {**here, **there}
        if here.get(name) != there.get(name)
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


def _shown(name: str, state: Mapping[str, Any]) -> str:
    value = state.get(name)
    return "not set" if value is None else f"{value} samples" if name in _IN_SAMPLES else str(value)
