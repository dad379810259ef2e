"""Rows of JSON, JSONL, Parquet, Arrow and CSV files, read one after another, each with its place."""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from foundry.config.errors import ConfigError, Violation
from foundry.data.files import ROWS, TABLES, open_bytes, opened_table, suffix_of

_Read = TypeVar("_Read")


@dataclass(frozen=True)
class Row:
    """One row of a user's file.

    Attributes:
        file: the number of its file among those that are read.
        number: its line, item or row there, counted from one.
        columns: what it holds, by name.
        wrong: why it cannot be read; None where it can.
    """

    file: int
    number: int
    columns: dict[str, Any] = field(default_factory=dict)
    wrong: str | None = None


class RowSplits(NamedTuple):
    """Rows to learn from, and those held out."""

    train: Iterable[Row]
    validation: Iterable[Row]


@dataclass(frozen=True)
class FileRows:
    """Rows of files of one kind, read when iterated.

    Attributes:
        files: in order.
        columns: those of which one must be there.
        key: the setting that names the files, for what is wrong with them.
        first_file: the number of the first of them.
        reads_all: read all columns; else, of a table, no others than `columns`.
    """

    files: Sequence[Path]
    columns: tuple[str, ...]
    key: str
    first_file: int = 0
    reads_all: bool = False

    def __iter__(self) -> Iterator[Row]:
        """The rows in order.

        Raises:
            ConfigError: a file cannot be read, or has none of the columns.
        """
        for number, file in enumerate(self.files, self.first_file):
            read = _table_rows if ROWS[suffix_of(file)] in TABLES else _object_rows
            yield from readable(partial(read, number, self), self.key, file)

    @cached_property
    def count(self) -> int:
        """How many rows there are."""
        return sum(1 for _ in self)


def readable(read: Callable[[Path], Iterator[_Read]], key: str, file: Path) -> Iterator[_Read]:
    """What `read` yields of a file; any error is the user's to know, with the file.

    Raises:
        ConfigError: the file cannot be read.
    """
    from pyarrow import ArrowException  # type: ignore[import-untyped]

    try:
        yield from read(file)
    except ConfigError:
        raise
    except UnicodeDecodeError as error:
        where = f"byte {error.start} is {error.object[error.start : error.start + 1]!r}"
        message = f"{file} is not text in UTF-8 ({where}); convert it, as with iconv -t UTF-8"
        raise ConfigError(Violation(key, message)) from error
    except (OSError, EOFError, zlib.error, ValueError, RecursionError, MemoryError, ArrowException) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(Violation(key, f"{file} cannot be read: {reason}; repair it or leave it out")) from error


def json_rows(file: Path) -> Iterator[tuple[str, int, Any, str | None]]:
    """The rows of a file whose lines are JSON; a .json file may be one list, too.

    Yields:
        What a row is called ("line" or "item"), its number from one, its value, and why it cannot be read or None.
    """
    with open_bytes(file) as stream:
        is_list = suffix_of(file) == ".json" and stream.peek(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
        if is_list:
            for number, row in enumerate(json.loads(stream.read().decode("utf-8-sig")), 1):
                yield "item", number, row, None
            return
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                yield "line", number, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8")), None
            except UnicodeDecodeError:
                yield "line", number, None, "is not UTF-8"
            except (ValueError, RecursionError) as error:
                yield "line", number, None, f"is not JSON ({error})"


def _object_rows(index: int, rows: FileRows, file: Path) -> Iterator[Row]:
    for _, number, row, wrong in json_rows(file):
        if wrong is None and not isinstance(row, dict):
            wrong = f"holds {type(row).__name__}, not an object"
        yield Row(index, number, row if wrong is None else {}, wrong)


def _table_rows(index: int, rows: FileRows, file: Path) -> Iterator[Row]:
    with opened_table(file) as table:
        names = table.schema.names
        if not (found := [name for name in rows.columns if name in names]):
            listed, wanted = ", ".join(sorted(names)) or "none", ", ".join(rows.columns)
            raise ConfigError(Violation(rows.key, f"{file} has the columns {listed}; none of {wanted} is there"))
        number = 0
        for batch in table.batches(names if rows.reads_all else found):
            try:
                values = batch.to_pylist()
            except UnicodeDecodeError:
                raise ValueError(f"rows {number + 1} to {number + len(batch)} hold text that is not UTF-8") from None
            for number, columns_of_row in enumerate(values, number + 1):  # noqa: B020
                yield Row(index, number, columns_of_row)
