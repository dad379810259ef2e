"""Settings of models whose initial weights and learning rates can depend on their width."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from math import gcd, lcm
from typing import TYPE_CHECKING, Any, ClassVar, Self

from foundry.config.schemas.model.base import Model
from foundry.config.schemas.optimizer import Adam, AdamW, Muon
from foundry.config.setting import check_unused, setting
from foundry.core.errors import Violation

if TYPE_CHECKING:
    from foundry.config.environment import Launch
    from foundry.config.schemas.root import Config


BASE_WIDTH = "hidden_size that parametrization=mup leaves unchanged, such as that of the models in a sweep of the rate"
"""Description of `base_width`."""


class Parametrization(Enum):
    """Dependence of initial weights and learning rates on the width of the model."""

    standard = "standard"
    mup = "mup"


@dataclass(frozen=True, kw_only=True)
class WidthSettings(Model):
    """Base class of settings of models that support `parametrization=mup`.

    Attributes:
        supports_mup: false for a derived model that does not support it.
        widths: names of sizes that are proportional to `hidden_size` if a model is widened.
    """

    supports_mup: ClassVar[bool] = True
    widths: ClassVar[tuple[str, ...]] = ()

    if TYPE_CHECKING:
        hidden_size: int
        num_heads: int

    parametrization: Parametrization = setting(
        Parametrization.standard,
        "mup: scale initial weights and learning rates with hidden_size / base_width, so that the best learning rate "
        "of a narrow model is close to that of a wide one; standard: no dependence on the width",
        since="0.1.0",
    )
    base_width: int = setting(256, BASE_WIDTH, ge=1, le=10**6, since="0.1.0")

    @property
    def is_mup(self) -> bool:
        """Whether `parametrization` is mup, as a value of the enum or as text."""
        return Parametrization(self.parametrization) is Parametrization.mup

    @property
    def width_ratio(self) -> float:
        """hidden_size / base_width; 1 for the standard parametrization."""
        return self.hidden_size / self.base_width if self.is_mup else 1.0

    @property
    def init_width(self) -> int:
        """Width from which `init_std=small` and `wang` compute the standard deviation."""
        return self.base_width if self.is_mup else self.hidden_size

    def at_width(self, width: int) -> Self:
        """Return these settings with another hidden size, the same head size, and all other widths in proportion.

        Args:
            width: the new hidden_size.

        Raises:
            ValueError: a size is not a whole number at this width; the message completes "is WIDTH but ...".
        """
        sizes: dict[str, Any] = {"hidden_size": width}
        for name in self.widths:
            size, remainder = divmod(getattr(self, name) * width, self.hidden_size)
            if remainder or not size:
                present = f"model.{name}={getattr(self, name)} at model.hidden_size={self.hidden_size}"
                raise ValueError(f"{present} is no whole number at this width; choose multiples of {self._least_width}")
            sizes[name] = size
        return replace(self, **sizes)

    @property
    def _least_width(self) -> int:
        """Smallest width that makes all sizes whole numbers."""
        return lcm(*(self.hidden_size // gcd(self.hidden_size, getattr(self, name)) for name in self.widths))

    def check(self) -> Iterator[Violation]:
        """Check that `base_width` has an effect, and that the model supports the parametrization."""
        if not self.is_mup:
            yield from check_unused(self, "model", ["base_width"], "model.parametrization=mup")
        elif not self.supports_mup:
            message = f"is mup but {type(self).__name__} has no rules for it; set it to standard, or choose"
            yield Violation("model.parametrization", f"{message} model=transformer or model=dit")

    def check_with(self, run: "Config", launch: "Launch") -> Iterator[Violation]:
        """Check that the optimizer has rules for `parametrization=mup`."""
        yield from super().check_with(run, launch)
        if not self.is_mup:
            return
        if not isinstance(run.optimizer, (Adam, Muon)):
            message = f"is mup but optimizer {type(run.optimizer).__name__} has no rules for it; set it to standard, or"
            yield Violation("model.parametrization", f"{message} choose optimizer=adamw or optimizer=muon")
        elif isinstance(run.optimizer, Adam) and not isinstance(run.optimizer, AdamW):
            decays = {"optimizer.weight_decay": run.optimizer.weight_decay}
            for name in ("start_weight_decay", "end_weight_decay"):
                decays[f"scheduler.{name}"] = getattr(run.scheduler, name, None) or 0.0
            for key, decay in decays.items():
                if decay:
                    message = f"is {decay:g} but the decay of Adam has no rule for model.parametrization=mup"
                    yield Violation(key, f"{message}; set it to 0, or choose optimizer=adamw")
