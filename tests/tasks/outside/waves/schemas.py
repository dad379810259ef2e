"""Schema of `data=waves` with its check, a resolver, and the options that the task adds to `foundry eval`."""

from dataclasses import dataclass
from typing import ClassVar

from foundry.config.schemas.data import Data
from foundry.config.setting import setting
from foundry.core.errors import Violation


@dataclass(frozen=True, kw_only=True)
class Waves(Data):
    offers: ClassVar[frozenset[str]] = frozenset({"values"})

    _target_: str = "waves.data.waves"
    hertz: float = setting(0.05, "oscillations a sample", gt=0, lt=0.5)
    period: int = setting("${waves_period:${data.hertz}}", "samples of an oscillation", ge=2)
    window: int = setting(4, "values that the next one is predicted from", ge=1, le=1000)


@dataclass(frozen=True, kw_only=True)
class WaveOptions:
    horizon: int = setting(3, "values to predict in a row", ge=1)


def period_of(hertz):
    return round(1 / hertz)


def check_window(config):
    data = config.data
    if isinstance(data, Waves) and data.window > data.period:
        yield Violation("data.window", f"is {data.window} but data.period is {data.period}; choose a smaller one")
