from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class NextValue:
    wants: ClassVar[frozenset[str]] = frozenset({"values"})
    metrics: ClassVar[tuple[str, ...]] = ("error",)
    loss_functions: ClassVar[tuple[str, ...]] = ("mse",)

    _target_: str = "waves.data.NextValue"
