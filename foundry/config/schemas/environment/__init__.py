"""`environment=`: the scores and rewards of the model's completions. Tasks have the environments."""

from dataclasses import dataclass
from typing import ClassVar

from foundry.core.moved_modules import find_moved

__getattr__ = find_moved(__name__)


@dataclass(frozen=True, kw_only=True)
class NoEnvironment:
    """No scoring of completions."""

    metrics: ClassVar[tuple[str, ...]] = ()

    _target_: str | None = None
