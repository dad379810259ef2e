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
from foundry.core.errors import Violation, as_text, contrast

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
        old: value in the checkpoint; None if the checkpoint has no value.
        new: value in this run; None if this run has no value.
        is_removed: the checkpoint has the setting, but this version of foundry does not.
    """

    key: str
    old: Any
    new: Any
    is_removed: bool = False

    def __str__(self) -> str:
        old, new = self._texts
        return f"{self.key}: {old} -> {'no longer a setting' if self.is_removed else new}"

    @property
    def _texts(self) -> tuple[str, str]:
        if self.key == _INTERVAL:
            return contrast(recorded_interval(self.old), recorded_interval(self.new), _format)
        return contrast(self.old, self.new, _format)

    @property
    def has_new_meaning(self) -> bool:
        """True if the number is unchanged but has another meaning in this version, so that a resume is refused."""
        return self.key == _INTERVAL and type(self.old) is int and self.new == str(self.old)

    @property
    def on_resume(self) -> OnResume:
        """Policy for a change on resume, declared by the schema of the setting or by its group."""
        if self.is_removed:
            return OnResume.same
        if self.has_new_meaning:
            return OnResume.refused
        declared = _declared().get(self.key)
        return declared or _of_groups().get(self.key.partition(".")[0], OnResume.refused)

    @property
    def is_allowed(self) -> bool:
        """True if the policy allows a resume with this difference; False for data, whose content decides."""
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
            return bool(self.new != "auto")
        return self.on_resume is not OnResume.same

    def violation(self) -> Violation:
        """Return the error for a user who resumes with this difference."""
        old, new = self._texts
        if self.has_new_meaning:
            message = (
                f"is {new}, which counts steps of the run, but an earlier version of foundry started this run and "
            )
            remedy = f"counted {new} steps from the start of each epoch; set '{old}' to keep that, or '{new} steps'"
            return Violation(self.key, f"{message}{remedy}")
        return Violation(self.key, f"is {new} but the checkpoint was trained with {old}; {REMEDY}")

    def of_finished(self, run_dir: object) -> Violation:
        """Return the error for starting a run with this difference in the run directory of a finished run."""
        old, new = self._texts
        message = (
            f"is {new} but {run_dir} holds a finished run with {old}; change it back, or choose another hydra.run.dir"
        )
        return Violation(self.key, message)


def differences(old: Mapping[str, Any], new: Mapping[str, Any], config: object = None) -> Iterator[Difference]:
    """Yield every leaf that differs between two configurations, in the order of keys.

    Args:
        old: plain containers of an earlier run, possibly written by another version of foundry.
        new: plain containers of this run.
        config: the dataclasses that `new` was made from. A setting that is missing in `old` then counts as its default,
            and a setting that is missing in `new` is marked as removed. With None, both are ordinary differences.
    """
    return _differences(respelled(dict(old)), respelled(dict(new)), config)


def _differences(
    old: Mapping[str, Any], new: Mapping[str, Any], config: object = None, prefix: str = ""
) -> Iterator[Difference]:
    same_part = is_dataclass(config) and all(old.get(key, new.get(key)) == new.get(key) for key in _KIND)
    schema = {item.name: item for item in fields(config)} if same_part else None  # type: ignore[arg-type]
    for key in [*new, *(key for key in old if key not in new)]:
        new_value, path = new.get(key), f"{prefix}{key}"
        old_value = old.get(key) if key in old or schema is None else _default(schema[key], new_value)
        if isinstance(old_value, Mapping) and isinstance(new_value, Mapping):
            yield from _differences(old_value, new_value, getattr(config, key, None), f"{path}.")
        elif not _are_same(path, new.get("_target_"), old_value, new_value):
            yield Difference(path, old_value, new_value, is_removed=key not in new and schema is not None)


def _are_same(path: str, target: object, old: object, new: object) -> bool:
    if path == _INTERVAL:
        return bool(recorded_interval(old) == recorded_interval(new))
    return old == new or _is_same_mixture(path, target, old, new)


def _is_same_mixture(path: str, target: object, old: object, new: object) -> bool:
    """Return True if two values are weights of a built-in dataset in equal proportions, with the same data order."""
    return path == "data.weights" and str(target).startswith("foundry.") and have_same_proportions(old, new)


def _default(item: "Field[Any]", new: Any) -> Any:
    """Return a field's default as plain containers. A default that interpolates another setting counts as unchanged."""
    return _resolve_default(plain(item.default if item.default_factory is MISSING else item.default_factory()), new)


def _resolve_default(value: Any, new: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _resolve_default(inner, new[key] if isinstance(new, Mapping) and key in new else inner)
            for key, inner in value.items()
        }
    return new if isinstance(value, str) and value.startswith("${") else value


@cache
def _declared() -> dict[str, OnResume]:
    """Return the policies of settings that differ from the policy of their group."""
    return {path: metadata["on_resume"] for path, metadata in settings() if metadata.get("on_resume")}


@cache
def _of_groups() -> dict[str, OnResume]:
    return {item.name: item.metadata["on_resume"] for item in fields(Config)}


def _format(value: Any) -> str:
    return "not set" if value is None else as_text(value)
