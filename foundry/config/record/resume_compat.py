"""Rules for changed settings on resume: which may change, and which are refused."""

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
"""Setting whose numbers have another meaning in records of an earlier version."""
_KIND = ("_target_", "strategy")
"""Settings that identify the schema of a group."""
REMEDY = "change it back, start from scratch in another hydra.run.dir, or set checkpoint.on_changed_config=warn"
"""End of an error about a resumed run that differs from its checkpoint."""


@dataclass(frozen=True)
class Difference:
    """Setting that differs from the value used to train the checkpoint.

    Attributes:
        key: dotted key of the setting.
        was: value in the checkpoint; None if it had no value.
        now: value in this run; None if it has no value.
        is_gone: the checkpoint has the setting, but this version of foundry does not.
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
        """True if the same number has another meaning in this version. The change is then always refused."""
        return self.key == _INTERVAL and type(self.was) is int and self.now == str(self.was)

    @property
    def on_resume(self) -> OnResume:
        """Policy for a change on resume, declared by the schema of the setting or by its group."""
        if self.is_gone:
            return OnResume.same
        if self.has_new_meaning:
            return OnResume.refused
        declared = _declared().get(self.key)
        return declared or _of_groups().get(self.key.partition(".")[0], OnResume.refused)

    @property
    def is_allowed(self) -> bool:
        """True if a run may be resumed with this difference."""
        return self.on_resume not in (OnResume.refused, OnResume.data)

    @property
    def locates_data(self) -> bool:
        """True if the setting is a location of data, so that the content of the data decides if a resume is allowed."""
        return self.on_resume is OnResume.data

    @property
    def is_budget(self) -> bool:
        """True if the setting changes the length of the run."""
        return self.on_resume is OnResume.budget

    @property
    def changes_result(self) -> bool:
        """True if a finished run would have produced another result with the new value."""
        if self.key == "checkpoint.resume":
            return bool(self.now != "auto")
        return self.on_resume is not OnResume.same

    def violation(self) -> Violation:
        """Return the error for a user who resumes with this difference."""
        was, now = self._texts
        if self.has_new_meaning:
            message = (
                f"is {now}, which counts steps of the run, but an earlier version of foundry started this run and "
            )
            remedy = f"counted {now} steps from the start of each epoch; set '{was}' to keep that, or '{now} steps'"
            return Violation(self.key, f"{message}{remedy}")
        return Violation(self.key, f"is {now} but the checkpoint was trained with {was}; {REMEDY}")

    def of_finished(self, run_dir: object) -> Violation:
        """Return the error for a user who asks a finished run for the result with this difference."""
        was, now = self._texts
        message = (
            f"is {now} but {run_dir} holds a finished run with {was}; change it back, or choose another hydra.run.dir"
        )
        return Violation(self.key, message)


def differences(was: Mapping[str, Any], now: Mapping[str, Any], typed: object = None) -> Iterator[Difference]:
    """Yield every leaf that differs between two configurations, in the order of keys.

    Args:
        was: plain containers of an earlier run, possibly written by another version of foundry.
        now: plain containers of this run.
        typed: the dataclasses that `now` was made from. A setting that is missing in `was` then counts as its default,
            and a setting that is missing in `now` is marked as gone. Without them, both count as ordinary differences.
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
    """Return True if both are weights of a built-in dataset in equal proportions, and so give the same order."""
    return path == "data.weights" and str(target).startswith("foundry.") and have_same_proportions(one, other)


def _default(item: "Field[Any]", now: Any) -> Any:
    """Return a field's default as plain containers. A default that interpolates another setting counts as unchanged."""
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
    """Return the policies of settings that differ from the policy of their group."""
    return {path: metadata["on_resume"] for path, metadata in settings() if metadata.get("on_resume")}


@cache
def _of_groups() -> dict[str, OnResume]:
    return {item.name: item.metadata["on_resume"] for item in fields(Config)}


def _shown(value: Any) -> str:
    return "not set" if value is None else shown(value)
