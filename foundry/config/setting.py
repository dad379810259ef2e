"""Declaration of schema fields: default, description and bounds."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass
from enum import Enum
from typing import Any

from foundry.core.errors import Violation, as_text

_LARGEST_INT = 2**63 - 1
"""Largest integer in torch, numpy and databases (int64)."""
_LARGEST_FLOAT, _SMALLEST_FLOAT = (2 - 2**-23) * 2.0**127, 2.0**-126
"""Limits of normal float32 numbers, which have full precision."""
_NULL = re.compile(r"\b(null: [^;]+)")
"""Part of a setting's description that defines the meaning of null."""
_LONGEST_TEXT = 4096
"""Longest path on Linux."""


class OnResume(Enum):
    """Policy for a setting whose value differs from the checkpoint on resume.

    Attributes:
        refused: the change would make the resumed run another run.
        schedule: the change is allowed if the learning-rate schedule stays the same; see
            `checkpoint.scheduler_on_resume`.
        data: the setting is a location of data; the content of the data decides.
        budget: the setting is a length of the run; a longer run is a continuation if its schedule allows it.
        allowed: the change is allowed, but a finished run would have had another result with it.
        same: the change is allowed and leaves every update the same, up to the rounding of sums.
    """

    refused = "refused"
    schedule = "schedule"
    data = "data"
    budget = "budget"
    allowed = "allowed"
    same = "same"


def setting(
    default: Any,
    doc: str,
    *,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
    parse: Callable[[str], object] | None = None,
    path: bool = False,
    finite: bool = True,
    on_resume: OnResume | None = None,
    runtime: bool = False,
    alone: Any = MISSING,
    since: str | None = None,
) -> Any:
    """Declare a schema field.

    In addition to the bounds, numbers must fit int64 or float32, and strings must be one line.

    Args:
        default: default value; for a container, a function that makes it, such as `dict`.
        doc: one line: meaning, unit, reason for the default.
        gt: exclusive lower bound; like the other bounds, it does not apply to null.
        ge: inclusive lower bound.
        lt: exclusive upper bound.
        le: inclusive upper bound.
        parse: called with the value as text; the message of its ValueError is shown to the user.
        path: the value names a file, folder or glob that must exist.
        finite: a number must be finite.
        on_resume: policy for another value in a resumed run; None for the policy of the group.
        runtime: the run itself reads the value, or a preset sets it for every part; a custom part need not accept it.
        alone: default for a part that is built in Python, without a run, if `default` is an interpolation.
        since: version that added the setting. The hash of the configuration leaves it out at its default, so runs of
            earlier versions keep their hash. Required for new settings; None includes the setting in every hash.

    Raises:
        ValueError: if `since` is combined with a default that is an interpolation.
    """
    if since is not None and isinstance(default, str) and "${" in default:
        raise ValueError(f"since={since} needs a default without interpolation, not {default}")
    bounds = {name: bound for name, bound in (("gt", gt), ("ge", ge), ("lt", lt), ("le", le)) if bound is not None}
    metadata = {
        "doc": doc,
        "bounds": bounds,
        "parse": parse,
        "path": path,
        "finite": finite,
        "on_resume": on_resume,
        "runtime": runtime,
        "alone": alone,
        "since": since,
    }
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def group(
    default: Any,
    on_resume: OnResume = OnResume.refused,
    *,
    given: tuple[str, ...] | None = None,
    offered: tuple[str, ...] = (),
    since: str | None = None,
) -> Any:
    """Declare a group of settings.

    Args:
        default: the schema; MISSING for a part, which an option chooses.
        on_resume: policy for settings of the group that do not declare one.
        given: for a part, the keyword arguments that it receives in addition to its settings.
        offered: for a part, the keyword arguments that it receives if it has these parameters.
        since: version that added the group, as in `setting`.
    """
    metadata = {"on_resume": on_resume, "given": given, "offered": offered, "since": since}
    if not isinstance(default, type):
        return field(default=default, metadata=metadata)
    return field(default_factory=default, metadata=metadata)


_HOLDS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "gt": ("above", lambda value, bound: value > bound),
    "ge": ("at least", lambda value, bound: value >= bound),
    "lt": ("below", lambda value, bound: value < bound),
    "le": ("at most", lambda value, bound: value <= bound),
}


def check_fields(node: object, path: str) -> Iterator[Violation]:
    """Yield a violation for every field of `node`, and of nested dataclasses, that is out of bounds."""
    if not is_dataclass(node):
        return
    for item in fields(node):
        value, key = getattr(node, item.name), f"{path}.{item.name}" if path else item.name
        if is_dataclass(value):
            yield from check_fields(value, key)
        else:
            yield from check_value(item, value, key)


def check_unused(node: Any, path: str, names: Iterable[str], requirement: str) -> Iterator[Violation]:
    """Yield a violation for each field in `names` that is not at its default, since `requirement` is not set.

    Args:
        node: dataclass of settings.
        path: dotted key of `node`.
        names: fields that have no effect with the current settings.
        requirement: setting that would give them an effect, for the message.
    """
    defaults = {item.name: item.default for item in fields(node)}
    for name in names:
        value = getattr(node, name)
        if value != defaults[name]:
            text = value.value if isinstance(value, Enum) else value
            yield Violation(f"{path}.{name}", f"is {text} but has no effect without {requirement}")


class OutOfBounds(Exception):
    """Raised on access to a value that is out of bounds."""


def guarded(node: Any, invalid_keys: Collection[str], path: str) -> Any:
    """Return a copy of a schema that raises on access to invalid values, so that nothing is derived from them.

    Args:
        node: dataclass of settings; anything else is returned unchanged.
        invalid_keys: dotted keys of values that are out of bounds; reading one raises OutOfBounds.
        path: dotted key of `node`.
    """
    if not is_dataclass(node) or not any(key.startswith(f"{path}.") for key in invalid_keys):
        return node

    def read(self: Any, name: str) -> Any:
        if f"{path}.{name}" in invalid_keys:
            raise OutOfBounds(f"{path}.{name}")
        return object.__getattribute__(self, name)

    copy: Any = object.__new__(type(type(node).__name__, (type(node),), {"__getattribute__": read}))
    for item in fields(node):
        object.__setattr__(copy, item.name, guarded(getattr(node, item.name), invalid_keys, f"{path}.{item.name}"))
    return copy


def check_value(item: "Field[Any]", value: object, key: str) -> Iterator[Violation]:
    """Yield a violation if a value of the field's type is out of the field's bounds."""
    problem = _text_problem(value) if isinstance(value, str) else None
    if isinstance(value, list) and "list[str]" in str(item.type) and not all(isinstance(part, str) for part in value):
        problem = f"is {as_text(value)} but must be a list of strings"
    parse = item.metadata.get("parse")
    if problem is None and parse is not None and value is not None:
        try:
            parse(str(value))
        except ValueError as error:
            problem = str(error)
    if problem is None and isinstance(value, (int, float)) and not isinstance(value, bool):
        problem = _number_problem(value, item.metadata.get("bounds", {}), finite=item.metadata.get("finite", True))
        if problem is not None and value <= 0 and (meaning := _NULL.search(item.metadata.get("doc", ""))):
            problem += f"; {key}={meaning[1]}"  # other frameworks write -1 or 0 for null
    if problem is not None:
        yield Violation(key, problem)


def _text_problem(text: str) -> str | None:
    """Return the reason why a string is invalid as a setting; None if it is valid."""
    if not text.strip():
        return "is empty; set a value, or leave it out"
    if len(text) > _LONGEST_TEXT:
        return f"is {as_text(text)}, which has {len(text):,} characters; the maximum is {_LONGEST_TEXT:,}"
    if unprintable := next((character for character in text if not character.isprintable()), None):
        code = unprintable.encode("unicode_escape").decode()
        return f"is {as_text(text)}, which contains the character {code}; remove it"
    return None


def _number_problem(value: float, bounds: Mapping[str, float], *, finite: bool) -> str | None:
    """Return the reason why a number is invalid as a setting; None if it is valid."""
    broken_bounds = [name for name, bound in bounds.items() if not _HOLDS[name][1](value, bound)]
    if broken_bounds or value != value:
        range_text = " and ".join(f"{_HOLDS[name][0]} {bounds[name]:,}" for name in broken_bounds)
        return f"is {as_text(value)} but must be {range_text or 'a number'}"
    if isinstance(value, int):
        return (
            None if abs(value) <= _LARGEST_INT else f"is {as_text(value)} but must be at most {_LARGEST_INT} (64 bits)"
        )
    if math.isinf(value):
        return f"is {as_text(value)} but must be finite" if finite else None
    if value == 0 or _SMALLEST_FLOAT <= abs(value) <= _LARGEST_FLOAT:
        return None
    return f"is {as_text(value)}, which float32 rounds to {'0' if abs(value) < 1 else 'infinity'}; give another number"
