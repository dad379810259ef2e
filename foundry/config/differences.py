"""Which settings of a run may change when it is resumed, and which make it another run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from foundry.config.errors import Violation

_FREE_GROUPS = ("checkpoint", "distributed", "evaluation", "guard", "tracking")
"""Groups that say where, when and how a run is watched and kept, not what it computes."""

_BUDGETS = ("hparams.epochs", "hparams.max_steps", "hparams.train_samples")
"""How long the run is: one that goes on longer is the same run, if its schedule allows it."""

_FREE = (
    *_BUDGETS,
    "data.cache_dir",
    "data.num_workers",
    "hparams.accum_freq",
    "hparams.grad_checkpointing",
    "hparams.per_gpu_batch_size",
    "hparams.torchcompile",
    "model.init_from",
    "model.logprob_tile_tokens",
)
"""Single settings that leave the global order and every update what they are."""

_SCHEDULE = ("hparams.lr", "scheduler")
"""Compared as the schedule that they make; see `checkpoint.scheduler_on_resume`."""


@dataclass(frozen=True)
class Difference:
    """A setting that is not what the checkpoint was trained with."""

    key: str
    was: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {_said(self.was)} -> {_said(self.now)}"

    @property
    def is_allowed(self) -> bool:
        """Whether a run may go on with it."""
        group = self.key.partition(".")[0]
        return group in _FREE_GROUPS or any(_within(self.key, name) for name in (*_FREE, *_SCHEDULE))

    @property
    def is_budget(self) -> bool:
        """Whether it changes how long the run is."""
        return self.key in _BUDGETS

    def violation(self) -> Violation:
        """What to tell a user who resumes with it."""
        return Violation(
            self.key,
            f"is {_said(self.now)} but the checkpoint was trained with {_said(self.was)}; give that, start afresh in "
            "another hydra.run.dir, or set checkpoint.on_changed_config=warn",
        )


def differences(was: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[Difference]:
    """Every leaf of two configurations, as plain containers, that is not the same in both, in the order of keys."""
    for key in [*now, *(key for key in was if key not in now)]:
        one, other, path = was.get(key), now.get(key), f"{prefix}{key}"
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from differences(one, other, f"{path}.")
        elif one != other:
            yield Difference(path, one, other)


def _within(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}.")


def _said(value: Any) -> str:
    return "not set" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
