"""Kinds of data files by suffix, and readers of their bytes, text and tables, compressed or not."""

import codecs
import gzip
import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from foundry.data.io.nested import require_unique
from foundry.run_dir.files import require_regular

ROWS: Mapping[str, str] = {
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".csv": "csv",
    ".tsv": "csv",
}
"""File kind by suffix, for files of rows."""
TEXTS: Mapping[str, str] = {".txt": "text", ".md": "text", **ROWS}
"""File kind by suffix, for files with text."""
TABLES = ("parquet", "arrow", "csv")
"""Kinds with a schema, whose columns are known before the rows are read."""
SAVE_TO_DISK_FILES = ("dataset_info.json", "state.json", "dataset_dict.json")
"""Metadata files that `save_to_disk` of the datasets library writes next to .arrow files."""

_COMPRESSED = (".gz", ".zst")
_SELF_COMPRESSED = (".parquet", ".arrow")
_ROWS_PER_BATCH = 1024
log = logging.getLogger(__name__)


def suffix_of(file: Path) -> str:
    """Return the suffix that determines the kind of a file, without the suffix of the compression."""
    inner = Path(file.stem).suffix
    return inner if file.suffix in _COMPRESSED and inner not in _SELF_COMPRESSED else file.suffix


def list_suffixes(kinds: Mapping[str, str]) -> str:
    """Return the suffixes as text, for a message."""
    return ", ".join(kinds)


def open_bytes(file: Path) -> io.BufferedReader:
    """Open a file for reading bytes; .gz and .zst files are decompressed as a stream.

    Raises:
        OSError: the file cannot be opened.
    """
    require_regular(file)
    if file.suffix == ".gz":
        return io.BufferedReader(cast(io.RawIOBase, gzip.open(file, "rb")))
    if file.suffix == ".zst":
        import pyarrow as pa  # type: ignore[import-untyped]

        return io.BufferedReader(pa.input_stream(str(file), compression="zstd"))
    return file.open("rb")


@dataclass(frozen=True)
class Utf8:
    """Decoder of UTF-8 with a policy for invalid bytes.

    Attributes:
        errors: Python's name of the policy: `strict` rejects invalid bytes, `replace` replaces them by U+FFFD and warns
            once per file.
        warned_files: files with a logged warning.
    """

    errors: str = "strict"
    warned_files: set[Path] = field(default_factory=set)

    @property
    def is_strict(self) -> bool:
        """True if invalid bytes are rejected."""
        return self.errors == "strict"

    def decode(self, data: bytes, file: Path, place: str) -> str:
        """Return the text of some bytes of a file.

        Args:
            data: the bytes.
            file: the file, for a warning.
            place: location of the bytes in the file, for a warning.

        Raises:
            UnicodeDecodeError: the bytes are not valid UTF-8, and `errors` is `strict`.
        """
        try:
            return data.decode()
        except UnicodeDecodeError:
            if self.is_strict:
                raise
            self.warn(file, place)
            return data.decode(errors=self.errors)

    def warn(self, file: Path, place: str) -> None:
        """Log a warning, once per file, that invalid bytes are replaced."""
        if file not in self.warned_files:
            self.warned_files.add(file)
            log.warning(
                "%s: %s is not valid UTF-8; invalid bytes are replaced by U+FFFD (data.encoding_errors)", file, place
            )


STRICT = Utf8()


def column_values(column: Any, utf8: Utf8, file: Path, first: int) -> list[Any]:
    """Return the values of a column as Python objects.

    Args:
        column: pyarrow array.
        utf8: how to decode texts; invalid texts inside lists or structs are always rejected.
        file: file of the column, for messages.
        first: number of the first row, for messages.

    Raises:
        ValueError: a text is not valid UTF-8 and is rejected; the message has the range of rows.
    """
    import pyarrow as pa

    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        rows = f"rows {first} to {first + len(column) - 1}"
        decoded = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        if utf8.is_strict or not _is_text(decoded.type):
            raise ValueError(f"{rows} hold text that is not valid UTF-8") from None
        values = decoded.cast(pa.large_binary()).to_pylist()
        return [
            None if value is None else utf8.decode(value, file, f"row {number}")
            for number, value in enumerate(values, first)
        ]


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


@dataclass(frozen=True)
class Table:
    """Open file with columns.

    Attributes:
        schema: pyarrow schema of all columns.
        read: function from column names to an iterator of record batches, with all rows in order.
    """

    schema: Any
    read: Any

    def batches(self, columns: Sequence[str]) -> Iterator[Any]:
        """Yield record batches of at most 1,024 rows.

        Raises:
            ValueError: one of the columns is duplicated in the file.
            pyarrow.ArrowException: the file is damaged.
        """
        require_unique(self.schema, columns)
        for batch in self.read(list(columns)):
            for start in range(0, len(batch), _ROWS_PER_BATCH):
                yield batch.slice(start, _ROWS_PER_BATCH)


@contextmanager
def open_table(file: Path, utf8: Utf8 = STRICT) -> Iterator[Table]:
    """Open a file of one of the kinds in `TABLES`; CSV columns are read as text.

    Args:
        file: the file.
        utf8: how to decode CSV files; texts of other files are decoded by `column_values`.

    Raises:
        OSError: the file cannot be read.
        pyarrow.ArrowException: the file is damaged, or its format does not match its suffix.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    require_regular(file)
    match ROWS[suffix_of(file)]:
        case "parquet":
            with pq.ParquetFile(file) as parquet:
                yield Table(parquet.schema_arrow, lambda names: parquet.iter_batches(_ROWS_PER_BATCH, columns=names))
        case "arrow":
            with pa.memory_map(str(file)) as mapped:
                try:
                    reader = pa.ipc.open_file(mapped)
                    batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
                except pa.ArrowInvalid:  # the datasets library writes streams, which have no footer
                    mapped.seek(0)
                    reader = batches = pa.ipc.open_stream(mapped)
                yield Table(reader.schema, lambda names: (_validate(batch.select(names), utf8) for batch in batches))
        case _:
            with _open_csv(file, utf8) as reader:
                yield Table(reader.schema, lambda names: (batch.select(names) for batch in reader))


def _validate(batch: Any, utf8: Utf8) -> Any:
    """Validate a memory-mapped batch, so that no offset in it points outside the file, and return it."""
    import pyarrow as pa

    bytes_of = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
    for column in batch.columns:
        as_bytes = None if utf8.is_strict else bytes_of.get(column.type)
        (column if as_bytes is None else column.view(as_bytes)).validate(full=True)
    return batch


class _ReplacingStream(io.RawIOBase):
    """Stream that replaces the invalid UTF-8 of another stream."""

    def __init__(self, stream: io.BufferedReader, utf8: Utf8, file: Path) -> None:
        self._stream, self._utf8, self._file = stream, utf8, file
        self._decoder, self._rest, self._line = codecs.getincrementaldecoder("utf-8")(utf8.errors), b"", 1

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest and (data := self._stream.readline()):
            self._rest = self._decoder.decode(data).encode()
            if self._rest != data:
                self._utf8.warn(self._file, f"line {self._line}")
            self._line += 1
        self._rest = self._rest or self._decoder.decode(b"", final=True).encode()
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


@contextmanager
def _open_csv(file: Path, utf8: Utf8) -> Iterator[Any]:
    import pyarrow as pa
    from pyarrow import csv

    read_options = csv.ReadOptions(use_threads=False)  # with threads, errors of pyarrow do not name the row
    parse_options = csv.ParseOptions(delimiter="\t" if suffix_of(file) == ".tsv" else ",", newlines_in_values=True)
    with (
        _open_text(file, utf8) as stream,
        csv.open_csv(pa.PythonFile(stream, mode="r"), read_options=read_options, parse_options=parse_options) as reader,
    ):
        names = reader.schema.names
    convert_options = csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False)
    with (
        _open_text(file, utf8) as stream,
        csv.open_csv(
            pa.PythonFile(stream, mode="r"),
            read_options=read_options,
            parse_options=parse_options,
            convert_options=convert_options,
        ) as reader,
    ):
        yield reader


def _open_text(file: Path, utf8: Utf8) -> io.BufferedReader:
    stream = open_bytes(file)
    return stream if utf8.is_strict else io.BufferedReader(_ReplacingStream(stream, utf8, file))
