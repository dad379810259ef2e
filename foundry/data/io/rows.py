"""Streaming readers of the rows of JSON, JSONL, Parquet, Arrow and CSV files, with file and row numbers."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from foundry.core.errors import ConfigError, Violation
from foundry.core.foreign import ForeignData
from foundry.data.io.files import ROWS, STRICT, TABLES, Utf8, column_values, open_bytes, open_table, suffix_of
from foundry.data.io.nested import path_in, value_at

_Read = TypeVar("_Read")
_MARK = "\ufeff"
_CONVERT = "convert it with iconv -t UTF-8, or set data.encoding_errors=replace"


@dataclass(frozen=True)
class Row:
    """One row of a data file.

    Attributes:
        file: index of the file among all files of the source.
        number: line, item or row number in the file, counted from one.
        columns: values by column name.
        error: reason why the row cannot be read; None if it is valid.
    """

    file: int
    number: int
    columns: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


class RowSplits(NamedTuple):
    """Training and validation rows."""

    train: Iterable[Row]
    validation: Iterable[Row]


@dataclass(frozen=True)
class FileRows:
    """Re-iterable stream of the rows of files of one kind.

    Attributes:
        files: files in order.
        columns: known columns; a table must have at least one of them.
        key: setting that names the files, for error messages.
        first_file: index of `files[0]` among all files of the source.
        reads_all: read all columns of a table; if false, only `columns` and `optional_columns`.
        renames: column name in the files, by the name that foundry uses; dots separate nested names.
        utf8: how to handle bytes that are not valid UTF-8.
        optional_columns: additional columns to read if a table has them.
    """

    files: Sequence[Path]
    columns: tuple[str, ...]
    key: str
    first_file: int = 0
    reads_all: bool = False
    renames: Mapping[str, str] = field(default_factory=dict)
    utf8: Utf8 = STRICT
    optional_columns: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows in order.

        Raises:
            ConfigError: a file cannot be read, or a table has none of the known columns.
        """
        for number, file in enumerate(self.files, self.first_file):
            read = _table_rows if ROWS[suffix_of(file)] in TABLES else _object_rows
            yield from readable(partial(read, number, self), self.key, file)

    @cached_property
    def count(self) -> int:
        """Number of rows."""
        return sum(1 for _ in self)

    def renamed(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a row with its columns renamed by `renames`; missing columns are omitted."""
        renamed = dict[str, Any]()
        for name, source_name in self.renames.items():
            with suppress(KeyError):
                renamed[name] = value_at(row, source_name)
        unchanged = {name: value for name, value in row.items() if name not in self.renames}
        return unchanged | renamed if self.renames else row


def readable(read: Callable[[Path], Iterator[_Read]], key: str, file: Path) -> Iterator[_Read]:
    """Yield the items that `read` yields for a file, and convert any exception to an error that names the file.

    Raises:
        ConfigError: the file cannot be read.
    """

    def refuse(reason: str) -> ConfigError:
        return ConfigError(Violation(key, f"{file} cannot be read: {reason}; repair it or leave it out"))

    with ForeignData(refuse):
        try:
            yield from read(file)
        except UnicodeDecodeError as error:
            location = f"line {line_of(error)}, byte {error.start} is {error.object[error.start : error.start + 1]!r}"
            message = f"{file} is not valid UTF-8 ({location}); {_CONVERT}"
            raise ConfigError(Violation(key, message)) from error


def line_of(error: UnicodeDecodeError) -> int:
    """Return the line number of the first invalid byte in a file that was decoded as a whole."""
    return error.object.count(b"\n", 0, error.start) + 1


def json_rows(file: Path, utf8: Utf8 = STRICT) -> Iterator[tuple[str, int, Any, str | None]]:
    """Yield the rows of a file of JSON lines, or of a .json file with one list.

    Args:
        file: the file.
        utf8: how to handle bytes that are not valid UTF-8.

    Yields:
        The noun for a row ("line" or "item"), its number from one, its value, and the reason why it cannot be read,
        or None.
    """
    with open_bytes(file) as stream:
        is_list = suffix_of(file) == ".json" and stream.peek(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
        if is_list:
            text = utf8.decode(stream.read(), file, "part of the file").removeprefix(_MARK)
            for number, row in enumerate(json.loads(text), 1):
                yield "item", number, row, None
            return
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                text = utf8.decode(line, file, f"line {number}")
                yield "line", number, json.loads(text.removeprefix(_MARK) if number == 1 else text), None
            except UnicodeDecodeError:
                yield "line", number, None, f"is not valid UTF-8 ({_CONVERT})"
            except (ValueError, RecursionError) as error:
                yield "line", number, None, f"is not JSON ({error})"


def _object_rows(index: int, rows: FileRows, file: Path) -> Iterator[Row]:
    for _, number, row, error in json_rows(file, rows.utf8):
        if error is None and not isinstance(row, dict):
            error = f"holds {type(row).__name__}, not an object"
        yield Row(index, number, rows.renamed(row) if error is None else {}, error)


def _table_rows(index: int, rows: FileRows, file: Path) -> Iterator[Row]:
    with open_table(file, rows.utf8) as table:
        names, source_names = table.schema.names, [rows.renames.get(name, name) for name in rows.columns]
        paths = [path for name in source_names if (path := path_in(table.schema, name)) is not None]
        if not (column_names := list(dict.fromkeys(path[0] for path in paths))):
            existing, expected = ", ".join(sorted(names)) or "none", ", ".join(source_names)
            raise ConfigError(Violation(rows.key, f"{file} needs one of the columns {expected}; it has {existing}"))
        column_names = list(dict.fromkeys([*column_names, *(name for name in rows.optional_columns if name in names)]))
        number = 0
        for batch in table.batches(names if rows.reads_all else column_names):
            columns = [column_values(column, rows.utf8, file, number + 1) for column in batch.columns]
            for values in zip(*columns, strict=True):
                number += 1
                yield Row(index, number, rows.renamed(dict(zip(batch.schema.names, values, strict=True))))
