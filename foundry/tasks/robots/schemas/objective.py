"""`objective=`: training of policies."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from foundry.config.schemas.objective import BetaSchedule, Prediction, check_sampling_steps
from foundry.config.setting import setting
from foundry.core.errors import Violation, as_text


def parse_regression_loss(text: str) -> None:
    """Check the name of a regression loss.

    Raises:
        ValueError: if it is not l1 or mse.
    """
    if text not in ("l1", "mse"):
        raise ValueError(f"is {as_text(text)} but must be l1 or mse")


@dataclass(frozen=True, kw_only=True)
class ActionChunks:
    """Settings shared by the objectives of policies, which predict the next actions from observations."""

    implies_hparams: ClassVar[str] = "policy"
    wants: ClassVar[frozenset[str]] = frozenset({"actions"})
    metrics: ClassVar[tuple[str, ...]] = ()
    same_as_data: ClassVar[tuple[str, ...]] = ("horizon", "action_dim")

    horizon: int = setting("${data.horizon}", "actions per chunk", ge=1, le=10**5)
    action_dim: int = setting("${data.action_dim}", "size of an action", ge=1, le=10**6)
    action_steps: int = setting(
        8,
        "actions of a chunk that are executed before the model predicts the next chunk",
        ge=1,
        le=10**5,
    )

    def check(self) -> Iterator[Violation]:
        """Check that `action_steps` is at most the length of a chunk."""
        if self.action_steps > self.horizon:
            message = f"is {self.action_steps} but must be at most data.horizon={self.horizon}, the actions of a chunk"
            yield Violation("objective.action_steps", message)


@dataclass(frozen=True, kw_only=True)
class DiffusionPolicy(ActionChunks):
    """Denoising of the next actions (Chi et al., 2023), for tasks that can be done in several ways."""

    loss_functions: ClassVar[tuple[str, ...]] = ("mse",)

    _target_: str = "foundry.DiffusionPolicy"
    seed: int = setting("${hparams.seed}", "seed of noise and timesteps", ge=0)
    prediction: Prediction = setting(
        Prediction.sample,
        "prediction target: sample: the actions, which learns fastest; epsilon: the noise; v_prediction: the velocity",
    )
    num_train_timesteps: int = setting(100, "timesteps of the noise schedule", ge=1, le=10**6)
    beta_schedule: BetaSchedule = setting(
        BetaSchedule.squaredcos_cap_v2, "noise schedule: squaredcos_cap_v2 (the cosine), linear or scaled_linear"
    )
    sampling_steps: int = setting(10, "denoising steps per action chunk", ge=1, le=10**6)

    def check(self) -> Iterator[Violation]:
        """Check that `action_steps` fits a chunk, and `sampling_steps` the noise schedule."""
        yield from super().check()
        yield from check_sampling_steps(self.sampling_steps, self.num_train_timesteps)


@dataclass(frozen=True, kw_only=True)
class FlowPolicy(ActionChunks):
    """Flow matching of the next actions along straight paths from noise (Lipman et al., 2023; Black et al., 2024)."""

    loss_functions: ClassVar[tuple[str, ...]] = ("mse",)

    _target_: str = "foundry.FlowPolicy"
    seed: int = setting("${hparams.seed}", "seed of noise and times", ge=0)
    sampling_steps: int = setting(10, "Euler steps per action chunk", ge=1, le=10**6)


@dataclass(frozen=True, kw_only=True)
class ActionRegression(ActionChunks):
    """Regression of the next actions, for tasks that can be done in one way only, and as a baseline."""

    _target_: str = "foundry.ActionRegression"
    loss_function: str = setting(
        "l1",
        "l1: absolute error, as in ACT; mse: squared error; hparams=policy follows it",
        parse=parse_regression_loss,
    )

    @property
    def loss_functions(self) -> tuple[str, ...]:
        """Name of the loss function."""
        return (self.loss_function,)
