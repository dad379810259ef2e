"""Files of a user's own: what kind they are of by their names, and how each kind is read; compressed or not."""

import gzip
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

ROWS: Mapping[str, str] = {
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".csv": "csv",
    ".tsv": "csv",
}
"""The suffixes of files of rows, and the kind that each is of."""
TEXTS: Mapping[str, str] = {".txt": "text", ".md": "text", **ROWS}
"""Likewise of those with text."""
TABLES = ("parquet", "arrow", "csv")
"""Kinds whose columns are known before their rows."""
OF_SAVE_TO_DISK = ("dataset_info.json", "state.json", "dataset_dict.json")
"""What datasets' `save_to_disk` writes beside .arrow files."""

_COMPRESSED = (".gz", ".zst")
_SELF_COMPRESSED = (".parquet", ".arrow")
_ROWS_PER_BATCH = 1024


def suffix_of(file: Path) -> str:
    """The suffix by which a file's kind is known, without that of its compression."""
    inner = Path(file.stem).suffix
    return inner if file.suffix in _COMPRESSED and inner not in _SELF_COMPRESSED else file.suffix


def listed_suffixes(kinds: Mapping[str, str]) -> str:
    """The suffixes, for a message."""
    return ", ".join(kinds)


def open_bytes(file: Path) -> io.BufferedReader:
    """What a file holds, decompressed while it is read.

    Raises:
        OSError: it cannot be read.
    """
    if file.suffix == ".gz":
        return io.BufferedReader(cast(io.RawIOBase, gzip.open(file, "rb")))
    if file.suffix == ".zst":
        import pyarrow as pa  # type: ignore[import-untyped]

        return io.BufferedReader(pa.input_stream(str(file), compression="zstd"))
    return file.open("rb")


@dataclass(frozen=True)
class Table:
    """An opened file of columns.

    Attributes:
        schema: pyarrow's, of all columns.
        read: yields record batches of these columns, all rows in their order.
    """

    schema: Any
    read: Any

    def batches(self, columns: Sequence[str]) -> Iterator[Any]:
        """Record batches of at most 1,024 rows.

        Raises:
            pyarrow.ArrowException: the file is damaged.
        """
        for batch in self.read(list(columns)):
            for start in range(0, len(batch), _ROWS_PER_BATCH):
                yield batch.slice(start, _ROWS_PER_BATCH)


@contextmanager
def opened_table(file: Path) -> Iterator[Table]:
    """Open a file of a kind in `TABLES`; all columns of CSV are text.

    Raises:
        OSError: it cannot be read.
        pyarrow.ArrowException: it is of another kind than its name says, or damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    match ROWS[suffix_of(file)]:
        case "parquet":
            with pq.ParquetFile(file) as parquet:
                yield Table(parquet.schema_arrow, lambda names: parquet.iter_batches(_ROWS_PER_BATCH, columns=names))
        case "arrow":
            with pa.memory_map(str(file)) as mapped:
                try:
                    reader = pa.ipc.open_file(mapped)
                    batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
                except pa.ArrowInvalid:  # datasets writes streams, which have no index at their ends
                    mapped.seek(0)
                    reader = batches = pa.ipc.open_stream(mapped)
                yield Table(reader.schema, lambda names: (_validated(batch.select(names)) for batch in batches))
        case _:
            with _opened_csv(file) as reader:
                yield Table(reader.schema, lambda names: (batch.select(names) for batch in reader))


def _validated(batch: Any) -> Any:
    """A batch that was mapped as it is, of which no value leads out of the file."""
    batch.validate(full=True)
    return batch


@contextmanager
def _opened_csv(file: Path) -> Iterator[Any]:
    import pyarrow as pa
    from pyarrow import csv

    parsing = csv.ParseOptions(delimiter="\t" if suffix_of(file) == ".tsv" else ",", newlines_in_values=True)
    with open_bytes(file) as stream, csv.open_csv(pa.PythonFile(stream, mode="r"), parse_options=parsing) as reader:
        names = reader.schema.names
    converting = csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False)
    with (
        open_bytes(file) as stream,
        csv.open_csv(pa.PythonFile(stream, mode="r"), parse_options=parsing, convert_options=converting) as reader,
    ):
        yield reader
