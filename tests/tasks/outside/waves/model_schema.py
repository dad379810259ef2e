from dataclasses import dataclass
from typing import ClassVar

from foundry.config.schemas.model import Model
from foundry.config.setting import setting


@dataclass(frozen=True, kw_only=True)
class Filter(Model):
    same_as_data: ClassVar[tuple[str, ...]] = ("window",)

    _target_: str = "waves.data.Filter"
    window: int = setting("${data.window}", "values that it sees", ge=1, le=1000)
