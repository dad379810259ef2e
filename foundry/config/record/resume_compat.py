"""Which settings of a run may change when it is resumed, and which make it another run."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Any

from foundry.config.diagnostics.names import settings
from foundry.config.record.frozen import plain
from foundry.config.schemas.evaluation import recorded_interval
from foundry.config.schemas.root import Config
from foundry.config.setting import OnResume
from foundry.config.sources import have_same_proportions
from foundry.config.target_names import respelled
from foundry.core.errors import Violation, contrast, shown

_INTERVAL = "evaluation.interval"
"""The setting of which a number in a record of an earlier version has another meaning."""
_KIND = ("_target_", "strategy")
"""The settings that say which schema a group has."""
REMEDY = "give that, start from scratch in another hydra.run.dir, or set checkpoint.on_changed_config=warn"
"""End of an error about a resumed run that differs from its checkpoint."""


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
        was, now = self._texts
        return f"{self.key}: {was} -> {'no longer a setting' if self.is_gone else now}"

    @property
    def _texts(self) -> tuple[str, str]:
        if self.key == _INTERVAL:
            return contrast(recorded_interval(self.was), recorded_interval(self.now), _shown)
        return contrast(self.was, self.now, _shown)

    @property
    def has_new_meaning(self) -> bool:
        """Whether the same number means something else in this version: it is refused, whatever its group allows."""
        return self.key == _INTERVAL and type(self.was) is int and self.now == str(self.was)

    @property
    def on_resume(self) -> OnResume:
        """What its schema says, or its group."""
        if self.is_gone:
            return OnResume.same
        if self.has_new_meaning:
            return OnResume.refused
        declared = _declared().get(self.key)
        return declared or _of_groups().get(self.key.partition(".")[0], OnResume.refused)

    @property
    def is_allowed(self) -> bool:
        """Whether a run may be resumed with it."""
        return self.on_resume not in (OnResume.refused, OnResume.data)

    @property
    def locates_data(self) -> bool:
        """Whether it says where data lies, so that the data itself tells whether it matters."""
        return self.on_resume is OnResume.data

    @property
    def is_budget(self) -> bool:
        """Whether it changes how long the run is."""
        return self.on_resume is OnResume.budget

    @property
    def changes_result(self) -> bool:
        """Whether a finished run would have had another result with it."""
        if self.key == "checkpoint.resume":
            return bool(self.now != "auto")
        return self.on_resume is not OnResume.same

    def violation(self) -> Violation:
        """What to tell a user who resumes with it."""
        was, now = self._texts
        if self.has_new_meaning:
            message = f"is {now}, which counts steps of the run, but an earlier version of foundry began this run and "
            remedy = f"counted {now} steps anew in each epoch; give '{was}' to continue so, or '{now} steps'"
            return Violation(self.key, f"{message}{remedy}")
        return Violation(self.key, f"is {now} but the checkpoint was trained with {was}; {REMEDY}")

    def of_finished(self, run_dir: object) -> Violation:
        """What to tell a user who asks a finished run for the result with it."""
        was, now = self._texts
        message = f"is {now} but {run_dir} holds a finished run with {was}; give that, or choose another hydra.run.dir"
        return Violation(self.key, message)


def differences(was: Mapping[str, Any], now: Mapping[str, Any], typed: object = None) -> Iterator[Difference]:
    """Every leaf of two configurations, as plain containers, that is not the same in both, in the order of keys.

    Args:
        was: of an earlier run, which another version of foundry may have written.
        now: of this run.
        typed: the dataclasses that `now` was made of. A setting that `was` does not know then has its default, and one
            that `now` does not know is gone; without them either is a difference like any other.
    """
    return _differences(respelled(dict(was)), respelled(dict(now)), typed)


def _differences(
    was: Mapping[str, Any], now: Mapping[str, Any], typed: object = None, prefix: str = ""
) -> Iterator[Difference]:
    same_part = is_dataclass(typed) and all(was.get(key, now.get(key)) == now.get(key) for key in _KIND)
    schema = {item.name: item for item in fields(typed)} if same_part else None  # type: ignore[arg-type]
    for key in [*now, *(key for key in was if key not in now)]:
        other, path = now.get(key), f"{prefix}{key}"
        one = was.get(key) if key in was or schema is None else _default(schema[key], other)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _differences(one, other, getattr(typed, key, None), f"{path}.")
        elif not _are_same(path, now.get("_target_"), one, other):
            yield Difference(path, one, other, is_gone=key not in now and schema is not None)


def _are_same(path: str, target: object, one: object, other: object) -> bool:
    if path == _INTERVAL:
        return bool(recorded_interval(one) == recorded_interval(other))
    return one == other or _is_same_mixture(path, target, one, other)


def _is_same_mixture(path: str, target: object, one: object, other: object) -> bool:
    """Whether these are weights of foundry's own data, whose order depends on proportions only, and have the same."""
    return path == "data.weights" and str(target).startswith("foundry.") and have_same_proportions(one, other)


def _default(item: "Field[Any]", now: Any) -> Any:
    """A field's default as plain containers; what follows another setting is compared by that one, and is as now."""
    return _followed(plain(item.default if item.default_factory is MISSING else item.default_factory()), now)


def _followed(value: Any, now: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _followed(inner, now[key] if isinstance(now, Mapping) and key in now else inner)
            for key, inner in value.items()
        }
    return now if isinstance(value, str) and value.startswith("${") else value


@cache
def _declared() -> dict[str, OnResume]:
    """The settings that say more than their group does."""
    return {path: metadata["on_resume"] for path, metadata in settings() if metadata.get("on_resume")}


@cache
def _of_groups() -> dict[str, OnResume]:
    return {item.name: item.metadata["on_resume"] for item in fields(Config)}


def _shown(value: Any) -> str:
    return "not set" if value is None else shown(value)
