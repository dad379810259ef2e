"""A field of a schema: its default, what it means and its bounds."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass
from enum import Enum
from typing import Any

from foundry.core.errors import Violation, shown

_LARGEST_INT = 2**63 - 1
"""What torch, numpy and the databases hold."""
_LARGEST_FLOAT, _SMALLEST_FLOAT = (2 - 2**-23) * 2.0**127, 2.0**-126
"""What float32 holds with all its digits."""
_NULL = re.compile(r"\b(null: [^;]+)")
"""The part of a setting's documentation that says what null means."""
_LONGEST_TEXT = 4096
"""A path's, on Linux."""


class OnResume(Enum):
    """What a resumed run may have otherwise than the checkpoint was trained with.

    Attributes:
        refused: it makes another run.
        schedule: it may change if the schedule that it makes does not; see `checkpoint.scheduler_on_resume`.
        data: it says where data lies; the content of the data decides.
        budget: it says how long the run is; one that is longer is the same run, if its schedule allows it.
        allowed: it may change, and a finished run would have had another result with it.
        same: it may change, and leaves every update what it is, but for the rounding of sums.
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
    """Declare a schema field. Whatever its bounds, a number is one that int64 or float32 holds, and a text one line.

    Args:
        default: the value when nobody says otherwise; a function that makes it, such as `dict`, for a container.
        doc: one line: meaning, unit, why this default.
        gt: a number must be above this; as the other bounds, it does not apply to null.
        ge: a number must be at least this.
        lt: a number must be below this.
        le: a number must be at most this.
        parse: called with the value; the message of the ValueError it raises is shown to the user.
        path: the value names a file, folder or glob that must exist.
        finite: a number may not be infinite.
        on_resume: whether a resumed run may have another value; None: as its group.
        runtime: the run itself reads it, or a preset sets it for every part; a part of the user's own need not take it.
        alone: default of a part that is built in Python, without a run, if `default` is an interpolation.
        since: version that added the setting. The hash of the configuration leaves it out at its default, so runs of
            earlier versions keep their hash. Required for new settings; None includes the setting in every hash.

    Raises:
        ValueError: `since` is combined with a default that is an interpolation.
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
        default: the schema; MISSING for a part, which is chosen.
        on_resume: what holds for its settings that say nothing else.
        given: for a part, what it is called with besides its own settings.
        offered: what it is called with if it takes it.
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
    """Yield a violation for every field of `node`, and of the dataclasses inside it, that is out of its bounds."""
    if not is_dataclass(node):
        return
    for item in fields(node):
        value, key = getattr(node, item.name), f"{path}.{item.name}" if path else item.name
        if is_dataclass(value):
            yield from check_fields(value, key)
        else:
            yield from check_value(item, value, key)


def check_unused(node: Any, path: str, names: Iterable[str], needed: str) -> Iterator[Violation]:
    """Yield a violation for each of these fields that is not at its default, since without `needed` it means nothing.

    Args:
        node: a dataclass of settings.
        path: its dotted key.
        names: fields that nothing reads as the settings are.
        needed: what would have them read.
    """
    defaults = {item.name: item.default for item in fields(node)}
    for name in names:
        value = getattr(node, name)
        if value != defaults[name]:
            text = value.value if isinstance(value, Enum) else value
            yield Violation(f"{path}.{name}", f"is {text} but means nothing without {needed}")


class OutOfBounds(Exception):
    """Somebody has read a value that is out of its bounds."""


def guarded(node: Any, wrong: Collection[str], path: str) -> Any:
    """A copy of a schema whose wrong values cannot be read, so that nothing is derived from them.

    Args:
        node: a dataclass of settings; anything else is returned as it is.
        wrong: dotted keys of values that are out of their bounds; reading one raises OutOfBounds.
        path: the dotted key of the node itself.
    """
    if not is_dataclass(node) or not any(key.startswith(f"{path}.") for key in wrong):
        return node

    def read(self: Any, name: str) -> Any:
        if f"{path}.{name}" in wrong:
            raise OutOfBounds(f"{path}.{name}")
        return object.__getattribute__(self, name)

    copy: Any = object.__new__(type(type(node).__name__, (type(node),), {"__getattribute__": read}))
    for item in fields(node):
        object.__setattr__(copy, item.name, guarded(getattr(node, item.name), wrong, f"{path}.{item.name}"))
    return copy


def check_value(item: "Field[Any]", value: object, key: str) -> Iterator[Violation]:
    """Yield a violation if a value of the field's type is out of the field's bounds."""
    wrong = _wrong_text(value) if isinstance(value, str) else None
    if isinstance(value, list) and "list[str]" in str(item.type) and not all(isinstance(part, str) for part in value):
        wrong = f"is {shown(value)} but must be a list of texts"
    parse = item.metadata.get("parse")
    if wrong is None and parse is not None and value is not None:
        try:
            parse(str(value))
        except ValueError as error:
            wrong = str(error)
    if wrong is None and isinstance(value, (int, float)) and not isinstance(value, bool):
        wrong = _wrong_number(value, item.metadata.get("bounds", {}), finite=item.metadata.get("finite", True))
        if wrong is not None and value <= 0 and (meaning := _NULL.search(item.metadata.get("doc", ""))):
            wrong += f"; {key}={meaning[1]}"  # other systems write -1 or 0 for it
    if wrong is not None:
        yield Violation(key, wrong)


def _wrong_text(text: str) -> str | None:
    """Why a text can be no setting; None where it can."""
    if not text.strip():
        return "is empty; give it a value, or leave it out"
    if len(text) > _LONGEST_TEXT:
        return f"is {shown(text)}, a text of {len(text):,} characters; it may have {_LONGEST_TEXT:,}"
    if odd := next((character for character in text if not character.isprintable()), None):
        return f"is {shown(text)}, with the character {odd.encode('unicode_escape').decode()}; leave that out"
    return None


def _wrong_number(value: float, bounds: Mapping[str, float], *, finite: bool) -> str | None:
    """Why a number can be no setting; None where it can."""
    broken = [name for name, bound in bounds.items() if not _HOLDS[name][1](value, bound)]
    if broken or value != value:
        wanted = " and ".join(f"{_HOLDS[name][0]} {bounds[name]:,}" for name in broken)
        return f"is {shown(value)} but must be {wanted or 'a number'}"
    if isinstance(value, int):
        return None if abs(value) <= _LARGEST_INT else f"is {shown(value)} but must be at most {_LARGEST_INT} (64 bits)"
    if math.isinf(value):
        return f"is {shown(value)} but must be finite" if finite else None
    if value == 0 or _SMALLEST_FLOAT <= abs(value) <= _LARGEST_FLOAT:
        return None
    return f"is {shown(value)}, which float32 holds as {'0' if abs(value) < 1 else 'infinity'}; give another number"
