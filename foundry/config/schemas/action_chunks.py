"""Settings of objectives whose model is a policy."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from foundry.config.setting import setting
from foundry.core.errors import Violation, shown


def parse_regression_loss(text: str) -> None:
    """Check what a user wrote.

    Raises:
        ValueError: it is neither l1 nor mse.
    """
    if text not in ("l1", "mse"):
        raise ValueError(f"is {shown(text)} but must be l1 or mse")


@dataclass(frozen=True, kw_only=True)
class ActionChunks:
    """What all objectives of policies have, which answer what was observed with the next actions."""

    brings_hparams: ClassVar[str] = "policy"
    wants: ClassVar[frozenset[str]] = frozenset({"actions"})
    metrics: ClassVar[tuple[str, ...]] = ()

    horizon: int = setting("${data.horizon}", "actions of a chunk", ge=1, le=10**5)
    action_dim: int = setting("${data.action_dim}", "numbers of an action", ge=1, le=10**6)
    action_steps: int = setting(
        8,
        "actions of a chunk that are carried out before the model is asked again",
        ge=1,
        le=10**5,
    )

    def check(self) -> Iterator[Violation]:
        """No more actions are carried out than there are."""
        if self.action_steps > self.horizon:
            message = f"is {self.action_steps} but must be at most data.horizon={self.horizon}, the actions of a chunk"
            yield Violation("objective.action_steps", message)
