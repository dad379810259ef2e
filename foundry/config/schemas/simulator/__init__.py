"""`simulator=`: the simulated environment for policies."""

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
    state_dim: int = setting(
        "???", "size of the state that a policy observes", ge=1, le=10**6, runtime=True, alone=None
    )
    action_dim: int = setting("???", "size of an action", ge=1, le=10**6, runtime=True, alone=None)
    image_size: int | None = setting(
        None,
        "height and width in pixels of the image that a policy also observes; null: no image",
        ge=8,
        le=4096,
        runtime=True,
    )
    max_steps: int = setting(100, "maximum number of actions in an episode", ge=1, le=10**9)
