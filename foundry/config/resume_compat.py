"""Which settings of a run may change when it is resumed, and which make it another run."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any

from foundry.config.errors import Violation
from foundry.config.frozen import plain

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

_DATA = ("data.path", "data.tokenizer", "data.validation_path")
"""Where data lies; compared by its content where that is known."""

_SAME_RESULT = (
    *(name for name in _FREE if name not in (*_BUDGETS, "model.init_from")),
    "checkpoint",
    "distributed",
    "evaluation.write_samples",
    "tracking",
)
"""What leaves the result of a finished run what it is, but for the rounding of sums."""

_CHANGES_RESULT = ("checkpoint.keep_best",)
"""Exceptions from these."""

_SCHEDULE = ("hparams.lr", "scheduler")
"""Compared as the schedule that they make; see `checkpoint.scheduler_on_resume`."""


@dataclass(frozen=True)
class Difference:
    """A setting that is not what the checkpoint was trained with.

    Attributes:
        key: the setting.
        was: in the checkpoint; None where it had none.
        now: in this run; None where it has none.
        is_gone: the checkpoint has it, and this version of foundry has no such setting.
    """

    key: str
    was: Any
    now: Any
    is_gone: bool = False

    def __str__(self) -> str:
        now = "no longer a setting" if self.is_gone else _said(self.now)
        return f"{self.key}: {_said(self.was)} -> {now}"

    @property
    def is_allowed(self) -> bool:
        """Whether a run may go on with it."""
        group = self.key.partition(".")[0]
        return self.is_gone or group in _FREE_GROUPS or any(_within(self.key, name) for name in (*_FREE, *_SCHEDULE))

    @property
    def locates_data(self) -> bool:
        """Whether it says where data lies, so that the data itself tells whether it matters."""
        return self.key in _DATA

    @property
    def is_budget(self) -> bool:
        """Whether it changes how long the run is."""
        return self.key in _BUDGETS

    @property
    def changes_result(self) -> bool:
        """Whether a finished run would have had another result with it."""
        if self.key == "checkpoint.resume":
            return bool(self.now != "auto")
        is_free = self.is_gone or any(_within(self.key, name) for name in _SAME_RESULT)
        return not is_free or any(_within(self.key, name) for name in _CHANGES_RESULT)

    def violation(self) -> Violation:
        """What to tell a user who resumes with it."""
        return Violation(
            self.key,
            f"is {_said(self.now)} but the checkpoint was trained with {_said(self.was)}; give that, start afresh in "
            "another hydra.run.dir, or set checkpoint.on_changed_config=warn",
        )

    def of_finished(self, run_dir: object) -> Violation:
        """What to tell a user who asks a finished run for the result with it."""
        return Violation(
            self.key,
            f"is {_said(self.now)} but {run_dir} holds a finished run with {_said(self.was)}; give that, "
            "or choose another hydra.run.dir",
        )


def differences(
    was: Mapping[str, Any], now: Mapping[str, Any], typed: object = None, prefix: str = ""
) -> Iterator[Difference]:
    """Every leaf of two configurations, as plain containers, that is not the same in both, in the order of keys.

    Args:
        was: of an earlier run, which another version of foundry may have written.
        now: of this run.
        typed: the dataclasses that `now` was made of. A setting that `was` does not know then has its default, and one
            that `now` does not know is gone; without them either is a difference like any other.
        prefix: of the keys.
    """
    same_part = is_dataclass(typed) and was.get("_target_") == now.get("_target_")
    schema = {item.name: item for item in fields(typed)} if same_part else None  # type: ignore[arg-type]
    for key in [*now, *(key for key in was if key not in now)]:
        other, path = now.get(key), f"{prefix}{key}"
        one = was.get(key) if key in was or schema is None else _default(schema[key], other)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from differences(one, other, getattr(typed, key, None), f"{path}.")
        elif one != other:
            yield Difference(path, one, other, is_gone=key not in now and schema is not None)


def _default(item: "Field[Any]", now: Any) -> Any:
    """A field's default as plain containers; what follows another setting is compared by that one, and is as now."""
    value = plain(item.default if item.default_factory is MISSING else item.default_factory())
    return now if isinstance(value, str) and value.startswith("${") else value


def _within(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}.")


def _said(value: Any) -> str:
    return "not set" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
