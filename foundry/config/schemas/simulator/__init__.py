"""`simulator=`: simulator of a task, such as one that a robot policy acts in."""

from dataclasses import dataclass

from foundry.config.setting import setting


@dataclass(frozen=True, kw_only=True)
class NoSimulator:
    """No simulator."""

    _target_: str | None = None


@dataclass(frozen=True, kw_only=True)
class Simulator:
    """Base class of settings for one task in a simulated environment."""

    _target_: str
    state_dim: int = setting("???", "numbers in the state that a policy sees", ge=1, le=10**6, runtime=True, alone=None)
    action_dim: int = setting("???", "numbers in an action", ge=1, le=10**6, runtime=True, alone=None)
    image_size: int | None = setting(
        None,
        "height and width in pixels of the picture that a policy sees besides; null: none",
        ge=8,
        le=4096,
        runtime=True,
    )
    max_steps: int = setting(100, "actions after which an episode is over", ge=1, le=10**9)
