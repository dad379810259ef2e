"""Streaming readers of the documents in text files, JSON files and tables; errors name the file."""

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from foundry.core.errors import ConfigError, Violation
from foundry.data.io.files import STRICT, TABLES, TEXTS, Utf8, column_values, open_bytes, open_table, suffix_of
from foundry.data.io.nested import names_in, names_of, path_in, type_at, value_at
from foundry.data.io.reading_progress import ReadingProgress, utf8_bytes
from foundry.data.io.rows import json_rows, line_of, readable

_FIELD = "data.text_field"


@dataclass(frozen=True)
class Documents:
    """Re-iterable stream of texts, which are read from files during iteration and can exceed memory.

    Attributes:
        files: files in order.
        read: yields the documents of one file.
        include: numbers of the documents to yield, counted over all files; None for all except `exclude`.
        exclude: numbers of the documents to skip.
    """

    files: tuple[Path, ...]
    read: Callable[[Path], Iterator[str]]
    include: Container[int] | None = None
    exclude: Container[int] = ()

    def __iter__(self) -> Iterator[str]:
        """Yield the selected texts in order, without empty ones."""
        for index, text in enumerate(self._all()):
            if text and index not in self.exclude and (self.include is None or index in self.include):
                yield text

    def count(self, progress: ReadingProgress) -> tuple[int, int, int]:
        """Return the number of documents, the number of non-empty ones, and the size of all texts in UTF-8 bytes.

        This reads all files completely, so it also finds damaged files.
        """
        total = filled = size = 0
        for text in progress.over(self._all(), utf8_bytes):
            total, filled, size = total + 1, filled + bool(text), size + utf8_bytes(text)
        return total, filled, size

    def _all(self) -> Iterator[str]:
        return (text for file in self.files for text in self.read(file))


def documents(files: Sequence[Path], *, text_field: str, key: str, utf8: Utf8 = STRICT) -> Documents:
    """Return the documents of files. A text file is one document; in other files, each row is one.

    Args:
        files: files of one kind.
        text_field: column or key of the text; dots separate nested names.
        key: setting that names the files, for error messages.
        utf8: how to handle bytes that are not valid UTF-8.

    Raises:
        ConfigError: during iteration, if a file cannot be read, or `text_field` is missing or not text; the message
            names the file.
    """
    read: Callable[[Path], Iterator[str]] = partial(_text_file, utf8=utf8)
    if (kind := TEXTS[suffix_of(files[0])]) != "text":
        read = partial(_table_rows if kind in TABLES else _json_rows, text_field=text_field, utf8=utf8)
    return Documents(tuple(files), partial(readable, read, key))


def source_files(files: Sequence[Path]) -> Documents:
    """Return source code files as one document each; bytes that are not valid UTF-8 are replaced."""
    return Documents(tuple(files), lambda file: iter([file.read_text(encoding="utf-8", errors="replace")]))


def _text_file(file: Path, *, utf8: Utf8) -> Iterator[str]:
    try:
        text = _read_all(file, "strict")
    except UnicodeDecodeError as error:
        if utf8.is_strict:
            raise
        utf8.warn(file, f"line {line_of(error)}")
        text = _read_all(file, utf8.errors)
    yield text


def _read_all(file: Path, errors: str) -> str:
    with open_bytes(file) as stream, TextIOWrapper(stream, encoding="utf-8", errors=errors) as text:
        return text.read()


def _json_rows(file: Path, *, text_field: str, utf8: Utf8) -> Iterator[str]:
    for noun, number, row, error in json_rows(file, utf8):
        if error is not None:
            raise ValueError(f"{noun} {number} {error}")
        yield _read_text(row, text_field, f"{file}, {noun} {number},")


def _read_text(row: object, text_field: str, location: str) -> str:
    """Return the text of a row; null is an empty document.

    Raises:
        ConfigError: the row is not an object, the key is missing, or its value is not valid text.
    """
    if not isinstance(row, dict):
        raise _config_error(_FIELD, f"{location} holds {type(row).__name__}, not an object with the key {text_field!r}")
    try:
        text = value_at(row, text_field)
    except KeyError:
        names = ", ".join(sorted(names_in(row))) or "none"
        raise _config_error(_FIELD, f"{location} has no key {text_field!r}; its keys: {names}") from None
    if text is not None and not isinstance(text, str):
        raise _config_error(_FIELD, f"{text_field!r} of {location} holds {type(text).__name__}, not text")
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        raise _config_error(
            _FIELD, f"{text_field!r} of {location} holds an unpaired surrogate, which is not valid Unicode"
        ) from None
    return text or ""


def _table_rows(file: Path, *, text_field: str, utf8: Utf8) -> Iterator[str]:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.compute as pc  # type: ignore[import-untyped]

    with open_table(file, utf8) as table:
        path = path_in(table.schema, text_field)
        if path is None:
            names = ", ".join(sorted(names_of(table.schema))) or "none"
            raise _config_error(_FIELD, f"{file} has no column {text_field!r}; its columns: {names}")
        kind: Any = type_at(table.schema, path)
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise _config_error(_FIELD, f"{text_field!r} of {file} holds {kind}, not text; choose a column of strings")
        first = 0
        for batch in table.batches([path[0]]):
            column = batch.column(0) if len(path) == 1 else pc.struct_field(batch.column(0), list(path[1:]))
            yield from (text or "" for text in column_values(column, utf8, file, first))
            first += len(batch)


def _config_error(key: str, message: str) -> ConfigError:
    return ConfigError(Violation(key, message))
