"""A field of a schema: its default, what it means, its bounds and the names other systems give it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import Field, field, fields, is_dataclass
from typing import Any

from foundry.config.errors import Violation


def setting(
    default: Any,
    doc: str,
    *,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
    source: str = "",
    parse: Callable[[str], object] | None = None,
    path: bool = False,
) -> Any:
    """Declare a schema field.

    Args:
        default: the value when nobody says otherwise; `dict` or `list` for an empty one.
        doc: one line: meaning, unit, why this default.
        gt: a number must be above this; as the other bounds, it does not apply to null.
        ge: a number must be at least this.
        lt: a number must be below this.
        le: a number must be at most this.
        source: the field's name in the documents foundry implements, where it differs.
        parse: called with the value; the message of the ValueError it raises is shown to the user.
        path: the value names a file, folder or glob that must exist.
    """
    bounds = {name: bound for name, bound in (("gt", gt), ("ge", ge), ("lt", lt), ("le", le)) if bound is not None}
    metadata = {"doc": doc, "bounds": bounds, "source": source, "parse": parse, "path": path}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


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
            yield from _check_value(item, value, key)


def _check_value(item: "Field[Any]", value: object, key: str) -> Iterator[Violation]:
    parse = item.metadata.get("parse")
    if parse is not None and value is not None:
        try:
            parse(str(value))
        except ValueError as error:
            yield Violation(key, str(error))
            return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    bounds = item.metadata.get("bounds", {})
    broken = [name for name, bound in bounds.items() if not _HOLDS[name][1](value, bound)]
    if broken or math.isnan(value):
        wanted = " and ".join(f"{_HOLDS[name][0]} {bound:g}" for name, bound in bounds.items()) or "a number"
        yield Violation(key, f"is {value:g} but must be {wanted}")
