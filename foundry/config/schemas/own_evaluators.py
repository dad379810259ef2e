"""`evaluation.evaluators`: settings of the built-in evaluators, which are chosen by `_target_`."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from foundry.config.setting import setting

MOST_EPISODES = 2**32
"""Episodes there are: evaluation has the simulator's seeds below this, demonstrations those from it on."""


class Told(Enum):
    """Which instruction a policy is told.

    Attributes:
        own: the episode's.
        other: another of the simulator's; success is still that of the episode's own.
    """

    own = "own"
    other = "other"


def _samples() -> Any:
    return setting(None, "samples or prompts, the first ones; null: all", ge=1, le=10**15)


def _batch_size() -> Any:
    return setting("${hparams.per_gpu_batch_size}", "samples or prompts of a forward pass", ge=1, le=10**9)


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The loss and the objective's metrics on held-out samples."""

    _target_: str = "foundry.evals.HeldOut"
    per_gpu_batch_size: int = _batch_size()
    max_samples: int | None = _samples()
    torchmetrics: dict[str, Any] | None = setting(
        None, "metrics of torchmetrics by name, each a `_target_` with its settings"
    )


@dataclass(frozen=True, kw_only=True)
class ExactMatch:
    """Greedy answers to held-out prompts."""

    _target_: str = "foundry.evals.ExactMatch"
    max_new_tokens: int = setting(256, "longest answer in tokens", ge=1, le=10**7)
    per_gpu_batch_size: int = _batch_size()
    max_samples: int | None = _samples()
    torchmetrics: dict[str, Any] | None = setting(
        None, "metrics of torchmetrics by name, each a `_target_` with its settings"
    )


@dataclass(frozen=True, kw_only=True)
class Success:
    """Success of a policy in simulated episodes."""

    _target_: str = "foundry.evals.Success"
    num_observations: int = setting(2, "observations that the policy is shown", ge=1, le=1024)
    episodes: int = setting(50, "episodes to run", ge=1, le=MOST_EPISODES)
    at_a_time: int = setting(25, "episodes that share a forward pass, with a simulator each", ge=1, le=10**6)
    first_episode: int = setting(0, "number of the first episode", ge=0, le=MOST_EPISODES - 1)
    draw: bool = setting(True, "draw the first episodes")
    instruction_tokens: int | None = setting(None, "tokens of an instruction; null: none", ge=1)
    instruction: Told = setting(Told.own, "own: the episode's; other: another of the simulator's")


@dataclass(frozen=True, kw_only=True)
class DrawnSamples:
    """Images or text that the objective draws."""

    _target_: str = "foundry.evals.DrawnSamples"
