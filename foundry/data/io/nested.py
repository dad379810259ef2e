"""Access to nested columns by dotted names: `message.text` is the field `text` of the object or struct `message`."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def value_at(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a row at a dotted name.

    A column whose name itself has dots takes precedence. A field of a null object is null.

    Raises:
        KeyError: the field does not exist.
    """
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if value is None:
            return None
        if not isinstance(value, Mapping) or part not in value:
            raise KeyError(name)
        value = value[part]
    return value


def names_in(row: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all fields of a row, nested ones included."""
    for key, value in row.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from names_in(value, f"{prefix}{key}.")


def path_in(schema: Any, name: str) -> tuple[str, ...] | None:
    """Return the path of a dotted name: a column and the fields of nested structs; None if it does not exist.

    Args:
        schema: pyarrow schema.
        name: dotted name.

    Raises:
        ValueError: the column is duplicated in the table.
    """
    if name in schema.names:
        require_unique(schema, [name])
        return (name,)
    column, *fields = name.split(".")
    if column not in schema.names:
        return None
    require_unique(schema, [column])
    kind = schema.field(column).type
    for part in fields:
        if part not in _fields_of(kind):
            return None
        kind = kind.field(part).type
    return (column, *fields)


def require_unique(schema: Any, columns: Iterable[str]) -> None:
    """Check that none of these columns is duplicated in a table.

    Raises:
        ValueError: a column is duplicated.
    """
    counts = Counter(schema.names)
    for name in columns:
        if counts[name] > 1:
            raise ValueError(f"it has {counts[name]} columns {name!r}; rename or delete one")


def type_at(schema: Any, path: tuple[str, ...]) -> Any:
    """Return the pyarrow type of the field at a path."""
    kind = schema.field(path[0]).type
    for part in path[1:]:
        kind = kind.field(part).type
    return kind


def names_of(schema: Any) -> Iterator[str]:
    """Yield the dotted names of all fields of a table, nested ones included."""
    for column in schema:
        yield from _names_below(column.name, column.type)


def _names_below(name: str, kind: Any) -> Iterator[str]:
    yield name
    for part in _fields_of(kind):
        yield from _names_below(f"{name}.{part}", kind.field(part).type)


def _fields_of(kind: Any) -> list[str]:
    """Return the names of the fields of a struct type, or an empty list for other types."""
    from pyarrow import types  # type: ignore[import-untyped]

    return [kind.field(number).name for number in range(kind.num_fields)] if types.is_struct(kind) else []
