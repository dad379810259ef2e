"""Columns inside others, named with dots: `message.text` is `text` of the object, or of the struct, `message`."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def value_at(row: Mapping[str, Any], name: str) -> Any:
    """What a row holds under a name; one that has dots itself goes first. Of an object that is null, null.

    Raises:
        KeyError: nothing is there.
    """
    if name in row:
        return row[name]
    found: Any = row
    for part in name.split("."):
        if found is None:
            return None
        if not isinstance(found, Mapping) or part not in found:
            raise KeyError(name)
        found = found[part]
    return found


def names_in(row: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """All names by which something in a row can be asked for."""
    for key, value in row.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from names_in(value, f"{prefix}{key}.")


def path_in(schema: Any, name: str) -> tuple[str, ...] | None:
    """The column of a table, and the fields of structs within it, that a name leads to; None: there is none.

    Args:
        schema: pyarrow's.
        name: with dots between them.

    Raises:
        ValueError: the table has this column twice.
    """
    if name in schema.names:
        require_unique(schema, [name])
        return (name,)
    column, *inside = name.split(".")
    if column not in schema.names:
        return None
    require_unique(schema, [column])
    kind = schema.field(column).type
    for part in inside:
        if part not in _fields_of(kind):
            return None
        kind = kind.field(part).type
    return (column, *inside)


def require_unique(schema: Any, columns: Iterable[str]) -> None:
    """Check that a table has each of these columns once.

    Raises:
        ValueError: it has one of them several times.
    """
    counts = Counter(schema.names)
    for name in columns:
        if counts[name] > 1:
            raise ValueError(f"it has {counts[name]} columns {name!r}; rename or delete one")


def type_at(schema: Any, path: tuple[str, ...]) -> Any:
    """The type of what a path leads to."""
    kind = schema.field(path[0]).type
    for part in path[1:]:
        kind = kind.field(part).type
    return kind


def names_of(schema: Any) -> Iterator[str]:
    """All names that lead to something in a table."""
    for column in schema:
        yield from _names_below(column.name, column.type)


def _names_below(name: str, kind: Any) -> Iterator[str]:
    yield name
    for part in _fields_of(kind):
        yield from _names_below(f"{name}.{part}", kind.field(part).type)


def _fields_of(kind: Any) -> list[str]:
    """The names of the fields of a struct; of anything else none."""
    from pyarrow import types  # type: ignore[import-untyped]

    return [kind.field(number).name for number in range(kind.num_fields)] if types.is_struct(kind) else []
