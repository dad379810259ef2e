"""The file metrics.jsonl, with one line per logged step and one per evaluation."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import IO, Any, TextIO, cast

from foundry.core.events import Evaluated, RunEnded, RunStarted, StepLogged
from foundry.run_dir.files import open_regular, replaced_atomically
from foundry.run_dir.names import METRICS
from foundry.run_dir.strict_json import decode, encode
from foundry.tracking.safe_observer import tolerant

_LONGEST_LINE = 2**20  # bytes
_LARGEST_FILE = 2**32
_OPTIONAL = ("tokens", "tokens_per_second", "tflops", "mfu", "reserved_memory_bytes", "allocator_retries")
_STEP_FIELDS = tuple(item.name for item in fields(StepLogged) if item.name != "metrics")


def step_record(event: StepLogged) -> dict[str, Any]:
    """Return a logged step as a dictionary: its fields that are not None, then the objective's metrics.

    Tokens per second replace samples per second if tokens are counted.
    """
    record = {name: getattr(event, name) for name in _STEP_FIELDS}
    for name in _OPTIONAL:
        if record[name] is None:
            del record[name]
    if event.tokens_per_second is not None:
        del record["samples_per_second"]
    return record | {name: value for name, value in event.metrics.items() if name not in record}


def evaluation_record(event: Evaluated) -> dict[str, Any]:
    """Return an evaluation as a dictionary: step, samples and metrics."""
    record: dict[str, Any] = {"step": event.step, "samples": event.samples}
    return record | {name: value for name, value in event.metrics.items() if name not in record}


def read_metrics(path: Path, *, field: str | None = None) -> list[dict[str, Any]]:
    """Return all records of a metrics.jsonl as a list in the order of their steps.

    A run that resumed from an earlier step wrote some steps twice; the later record is kept.

    Args:
        path: the file, or its run directory; exceptions are those of `iterate_metrics`.
        field: name of a field; lines without it are skipped.
    """
    records: dict[tuple[bool, int], dict[str, Any]] = {}
    for record in iterate_metrics(path, field=field):
        key = (is_evaluation(record), record["step"])
        records.pop(key, None)
        records[key] = record
    return sorted(records.values(), key=lambda record: (record["step"], is_evaluation(record)))


def read_curve(path: Path, name: str) -> list[tuple[int, Any]]:
    """Return (optimizer step, value) pairs of one field of a metrics.jsonl, in the order of steps.

    Takes less memory than `read_metrics`, which keeps all fields.
    """
    curves: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
    for record in iterate_metrics(path, field=name):
        if name in record:
            curves[is_evaluation(record)][record["step"]] = record[name]
    logged, measured = curves
    if logged and measured:
        return [(step, curve[step]) for step in sorted({*logged, *measured}) for curve in curves if step in curve]
    return sorted((logged or measured).items(), key=lambda point: point[0])


def read_step(path: Path, step: int) -> list[dict[str, Any]]:
    """Return the records of one optimizer step in the order of the file. Other lines are not decoded."""
    pattern = re.compile(rb'"step":\s*%d\b' % step)
    return [record for record in iterate_metrics(path, pattern=pattern) if record["step"] == step]


def iterate_metrics(
    path: Path, *, field: str | None = None, pattern: "re.Pattern[bytes] | None" = None
) -> Iterator[dict[str, Any]]:
    """Yield the records of a metrics.jsonl in the order of the file, NaN and infinities as floats.

    An incomplete last line, as a killed run leaves it, is skipped.

    Args:
        path: the file, or its run directory.
        field: name of a field; lines without it are skipped without decoding, which is much faster.
        pattern: regular expression; lines that do not match are skipped without decoding.

    Raises:
        ValueError: if a complete line is not a record.
        OSError: if the path is not a regular file, or cannot be read.
    """
    path = path / METRICS if path.is_dir() else path
    key = b"" if field is None else f'"{field}":'.encode()
    with open_regular(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), start=1):
            is_match = key in line and (pattern is None or pattern.search(line))
            if not is_match and len(line) < _LONGEST_LINE:
                continue
            if not line.endswith(b"\n"):
                if len(line) < _LONGEST_LINE:
                    break
                raise ValueError(f"{path}:{number} is longer than any record")
            record = _record(line)
            if record is None:
                raise ValueError(f"{path}:{number} is not a record: {line[:80]!r}")
            yield record


def is_evaluation(record: Mapping[str, Any]) -> bool:
    """Return True for the record of an evaluation, False for a logged step, which has a loss."""
    return "loss" not in record


def _record(line: bytes) -> dict[str, Any] | None:
    """Decode the record of a line; None if the line is not a record."""
    try:
        record = decode(line.decode())
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


class MetricsFile:
    """Observer that appends to `metrics.jsonl`; each line is flushed to the operating system before the next step."""

    def __init__(self, *, run_dir: Path) -> None:
        self._path = Path(run_dir) / METRICS
        self._file: TextIO | None = None

    @tolerant
    def on_start(self, event: RunStarted) -> None:
        """Open the file, and remove records of an earlier start after the step that the run resumes from."""
        _cut_torn_line(self._path)
        _cut_after(self._path, event.step)
        self._open()

    @tolerant
    def on_step(self, event: StepLogged) -> None:
        """Write the step's line."""
        self._write(step_record(event))

    @tolerant
    def on_evaluation(self, event: Evaluated) -> None:
        """Write the evaluation's line."""
        self._write(evaluation_record(event))

    @tolerant
    def on_end(self, event: RunEnded) -> None:
        """Sync the file to disk and close it."""
        if self._file is not None:
            file, self._file = self._file, None
            with file:
                file.flush()
                os.fsync(file.fileno())

    def _write(self, record: dict[str, Any]) -> None:
        file = self._file or self._open()
        file.write(encode(record) + "\n")
        file.flush()

    def _open(self) -> TextIO:
        _cut_torn_line(self._path)
        file = cast(TextIO, open_regular(self._path, "a"))
        self._file = file
        return file


def _cut_torn_line(path: Path) -> None:
    """Remove an incomplete last line from a file, if the file exists."""
    if not path.exists():
        return
    with open_regular(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(size - _LONGEST_LINE, 0)
        file.seek(start)
        end = start + file.read().rfind(b"\n") + 1
    if end < size:
        with open_regular(path, "ab") as file:
            file.truncate(end)


def _cut_after(path: Path, step: int) -> None:
    """Remove records after a step, and lines that are not records, from a file, if the file exists."""
    if not path.exists():
        return
    with open_regular(path, "rb") as file:
        if os.fstat(file.fileno()).st_size > _LARGEST_FILE:
            raise ValueError(f"{path} is too large for a metrics file")
        if all(_is_until(line, step) for line in _bounded_lines(file)):
            return
        file.seek(0)
        with replaced_atomically(path, durable=True) as output:
            output.writelines(line for line in _bounded_lines(file) if _is_until(line, step))


def _bounded_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file; a line that is incomplete or longer than any record becomes an empty one.

    An overlong line is never held in memory.
    """
    is_start = True
    while part := file.readline(_LONGEST_LINE):
        is_end = part.endswith(b"\n")
        if is_start:
            yield part if is_end else b""
        is_start = is_end


def _is_until(line: bytes, step: int) -> bool:
    """Return True if a line is a record of this step or an earlier one."""
    record = _record(line)
    return record is not None and record["step"] <= step
