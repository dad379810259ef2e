"""Documents to learn from: where they are read and which of them are held out."""

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path
from typing import Any, Protocol

from foundry.config.errors import ConfigError, Violation

_NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_GENERATED = {"encodings", "pydoc_data"}
_KINDS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}


class Documents(Protocol):
    """Texts that are read when iterated, so that there may be more than memory holds."""

    def __len__(self) -> int:
        """Number of documents, empty ones included."""
        ...

    def __iter__(self) -> Iterator[str]:
        """The texts that are not empty, in order."""
        ...

    def select(self, indices: Sequence[int]) -> "Documents":
        """Some of the documents."""
        ...


@dataclass(frozen=True)
class Corpus:
    """Documents by split.

    Attributes:
        train: to learn from.
        validation: held out.
        fingerprint: SHA-256 of their contents, names and split, in hexadecimal.
        content: the same without the names of files, where they do not matter.
    """

    train: Iterable[str]
    validation: Iterable[str]
    fingerprint: str
    content: str


@dataclass(frozen=True)
class _Files:
    """One document a file."""

    paths: tuple[Path, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[str]:
        texts = (path.read_text(encoding="utf-8", errors="replace") for path in self.paths)
        return filter(None, texts)

    def select(self, indices: Sequence[int]) -> "_Files":
        return _Files(tuple(self.paths[index] for index in indices))


@dataclass(frozen=True)
class _Column:
    """One document a row of a `datasets.Dataset`."""

    rows: Any
    text_field: str

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[str]:
        return filter(None, self.rows[self.text_field])

    def select(self, indices: Sequence[int]) -> "_Column":
        return _Column(self.rows.select(indices), self.text_field)


def stdlib_corpus(*, held_out: float) -> Corpus:
    """The modules of the running Python's standard library, without tests and generated tables.

    Args:
        held_out: share of files for validation, chosen by the hash of their names alone.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = {path.relative_to(root).as_posix(): path for path in _python_files(root)}
    names = list(paths)
    chosen = held_out_names(names, held_out)
    digest = _digest([f"stdlib {held_out}", *names], _hashes(paths.values()))
    return Corpus(
        train=_Files(tuple(paths[name] for name in names if name not in chosen)),
        validation=_Files(tuple(paths[name] for name in names if name in chosen)),
        fingerprint=digest,
        content=digest,
    )


def _python_files(root: Path) -> list[Path]:
    found: list[Path] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = set(subfolders) - _NOT_SOURCE - _GENERATED  # or site-packages would be walked in vain
        found += (Path(folder, file) for file in files if file.endswith(".py"))
    return sorted(found)


def held_out_names(names: Sequence[str], share: float) -> set[str]:
    """The share of names whose hashes come first: the same in every run, at least one and never all.

    Args:
        names: at least two, without duplicates.
        share: between 0 and 1.
    """
    ranked = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    return set(ranked[: min(max(1, round(share * len(ranked))), len(ranked) - 1)])


def files_corpus(*, path: str, text_field: str, validation_path: str | None, held_out: float, cache_dir: str) -> Corpus:
    """The user's own files. A text file is one document; a line of JSONL or a row of Parquet is one.

    Args:
        path: file, folder or glob.
        text_field: column or key of the text.
        validation_path: files to hold out; None: a share of `path`'s documents, or of a single document's end.
        held_out: that share.
        cache_dir: where `datasets` keeps its Arrow files.

    Raises:
        ConfigError: there are no files, kinds are mixed, the column is missing or the documents are empty.
    """
    files = _find_files(path, "data.path")
    validation_files = [] if validation_path is None else _find_files(validation_path, "data.validation_path")
    described = [f"files {text_field} {held_out} {bool(validation_files)}", *(file.name for file in files)]
    hashes = _hashes([*files, *validation_files])
    fingerprint = _digest(described, hashes)
    content = _digest([described[0], _KINDS[files[0].suffix], str(len(files))], hashes)
    texts = _read_texts(files, text_field, cache_dir, "data.path")
    if validation_files:
        validation = _read_texts(validation_files, text_field, cache_dir, "data.validation_path")
        return Corpus(texts, validation, fingerprint, content)
    if len(texts) == 1:
        text = "".join(texts)
        cut = round(len(text) * (1 - held_out))
        return Corpus([text[:cut]], [text[cut:]], fingerprint, content)
    chosen = held_out_names([str(index) for index in range(len(texts))], held_out)
    by_split: dict[bool, list[int]] = {True: [], False: []}
    for index in range(len(texts)):
        by_split[str(index) in chosen].append(index)
    return Corpus(texts.select(by_split[False]), texts.select(by_split[True]), fingerprint, content)


def _find_files(pattern: str, key: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix in _KINDS)
    elif has_magic(pattern):
        found = sorted(file for file in Path(path.anchor).glob(str(path.relative_to(path.anchor))) if file.is_file())
    else:
        found = [path] if path.is_file() else []
    if not found:
        kinds = ", ".join(_KINDS)
        raise ConfigError(Violation(key, f"{pattern!r} has no files; give a file, folder or glob of {kinds} files"))
    kinds_found = {file.suffix for file in found}
    if len({_KINDS.get(suffix) for suffix in kinds_found}) > 1 or not kinds_found <= _KINDS.keys():
        message = f"{pattern!r} has files of {', '.join(sorted(kinds_found))}; choose one kind of {', '.join(_KINDS)}"
        raise ConfigError(Violation(key, message))
    return found


def _read_texts(files: Sequence[Path], text_field: str, cache_dir: str, key: str) -> Documents:
    kind = _KINDS[files[0].suffix]
    if kind == "text":
        return _Files(tuple(files))
    from datasets import load_dataset  # type: ignore[import-untyped]
    from datasets.exceptions import DatasetGenerationError  # type: ignore[import-untyped]

    try:
        rows = load_dataset(
            kind,
            data_files=[str(file.resolve()) for file in files],
            split="train",
            cache_dir=str(Path(cache_dir).resolve() / "arrow"),
        )
    except DatasetGenerationError as error:
        message = f"{files[0].name!r} and what goes with it cannot be read as {kind}: {error.__cause__ or error}"
        raise ConfigError(Violation(key, " ".join(message.split()))) from error
    if text_field not in rows.column_names:
        message = f"{text_field!r} is not among the columns {', '.join(sorted(rows.column_names))} of {files[0].name!r}"
        raise ConfigError(Violation("data.text_field", message))
    if rows.features[text_field].dtype not in ("string", "large_string"):
        message = f"{text_field!r} holds {rows.features[text_field].dtype}, not text; choose a column of strings"
        raise ConfigError(Violation("data.text_field", message))
    return _Column(rows, text_field)


def _hashes(files: Iterable[Path]) -> list[bytes]:
    """The SHA-256 of each file's content."""
    found: list[bytes] = []
    for file in files:
        with file.open("rb") as stream:
            found.append(hashlib.file_digest(stream, "sha256").digest())
    return found


def _digest(names: Iterable[str], hashes: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(["\0".join(names).encode(), *hashes])).hexdigest()
