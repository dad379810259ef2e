"""Text corpora: their files, and the split of documents into training and validation."""

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from glob import has_magic
from pathlib import Path
from typing import NamedTuple, Self

from foundry.config.schemas.data import RowFiles, TextFiles, TokenFiles
from foundry.config.sources import is_url, listed_paths
from foundry.core.errors import ConfigError, Violation
from foundry.data.corpora.documents import Documents, documents, source_files
from foundry.data.io.file_digests import file_digests
from foundry.data.io.files import SAVE_TO_DISK_FILES, TEXTS, Utf8, list_suffixes, suffix_of
from foundry.data.io.reading_progress import ReadingProgress
from foundry.data.io.remote import fetch_files
from foundry.data.mixture import Interleaved, Sources

_NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_GENERATED = {"encodings", "pydoc_data"}
PATH, VALIDATION_PATH = "data.path", "data.validation_path"


class Splits(NamedTuple):
    """Training and validation documents, and their total size in bytes (None if it was not counted)."""

    train: Iterable[str]
    validation: Iterable[str]
    num_bytes: int | None = None


@dataclass(frozen=True)
class Corpus:
    """Text corpus whose documents are opened on demand.

    Attributes:
        fingerprint: SHA-256 of contents, file names and split, in hexadecimal.
        content: like the fingerprint, but without file names if the split does not depend on them.
        read: opens the documents; called only if their tokens are not cached.
    """

    fingerprint: str
    content: str
    read: Callable[[], Splits]


def stdlib_corpus(*, held_out: float) -> Corpus:
    """Return the modules of the running Python's standard library, without tests and generated tables.

    Args:
        held_out: fraction of files for validation, selected by a hash of their names.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = {path.relative_to(root).as_posix(): path for path in _python_files(root)}
    names = list(paths)
    validation_names = held_out_names(names, held_out)
    train = source_files([paths[name] for name in names if name not in validation_names])
    validation = source_files([paths[name] for name in names if name in validation_names])
    digest = _digest([f"stdlib {held_out}", *names], file_digests([*paths.values()]))
    return Corpus(digest, digest, lambda: Splits(train, validation))


def _python_files(root: Path) -> list[Path]:
    paths: list[Path] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = set(subfolders) - _NOT_SOURCE - _GENERATED  # os.walk skips the removed subfolders
        paths += (Path(folder, file) for file in files if file.endswith(".py"))
    return sorted(paths)


def held_out_names(names: Sequence[str], share: float) -> set[str]:
    """Return the names with the smallest hashes: the same in every run, at least one, and never all.

    Args:
        names: at least two names, without duplicates.
        share: fraction of names to return, between 0 and 1.
    """
    ranked = sorted(names, key=_hash_name)
    return set(ranked[: _num_held_out(len(ranked), share)])


def _num_held_out(count: int, share: float) -> int:
    return min(max(1, round(share * count)), count - 1)


def _hash_name(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


@dataclass(frozen=True)
class HeldOutNumbers:
    """Set of the numbers below a count that `held_out_names` would select, without storing them.

    Attributes:
        last: largest hash of a number in the set.
    """

    last: bytes

    @classmethod
    def choose(cls, count: int, share: float) -> Self:
        """Build the set: find its largest hash in two passes over all hashes that keep few of them in memory.

        Args:
            count: number of numbers, at least two.
            share: fraction of numbers in the set, between 0 and 1.
        """
        per_prefix = [0] * 2**16
        for number in range(count):
            per_prefix[_prefix(_hash_name(str(number)))] += 1
        remaining = _num_held_out(count, share)
        prefix = 0
        while per_prefix[prefix] < remaining:
            remaining -= per_prefix[prefix]
            prefix += 1
        hashes = (_hash_name(str(number)) for number in range(count))
        return cls(sorted(digest for digest in hashes if _prefix(digest) == prefix)[remaining - 1])

    def __contains__(self, number: object) -> bool:
        """Return whether the number is held out."""
        return _hash_name(str(number)) <= self.last


def _prefix(digest: bytes) -> int:
    return digest[0] << 8 | digest[1]


def files_corpus(settings: TextFiles) -> Corpus:
    """Return the corpus of the configured files. A text file is one document; in other files, each row is one.

    If there are several paths, `Splits.train` is a `Sources` with one part per path. If there are no validation files,
    a fraction of the documents of each path is held out, or the end of the document if a path has only one.

    Raises:
        ConfigError: there are no files, they are of several kinds, or a file cannot be read. Errors in the contents of
            files are raised by `Corpus.read`.
    """
    utf8 = Utf8(settings.encoding_errors.value)
    description = f"files {settings.text_field} {settings.held_out}{'' if utf8.is_strict else f' {utf8.errors}'}"
    corpus_files = find_corpus_files(settings, description=description)
    open_documents = partial(documents, text_field=settings.text_field, utf8=utf8)
    read = partial(_read, corpus_files.train, corpus_files.validation, open_documents, settings.held_out)
    return Corpus(corpus_files.fingerprint, corpus_files.content, read)


class CorpusFiles(NamedTuple):
    """Files of each source of a corpus, and their hashes with and without file names.

    `validation` is empty if there are no validation files.
    """

    train: list[list[Path]]
    validation: list[list[Path]]
    fingerprint: str
    content: str


def find_corpus_files(
    settings: TextFiles | TokenFiles | RowFiles, *, description: str, kinds: Mapping[str, str] = TEXTS
) -> CorpusFiles:
    """Find the files of `path` and of `validation_path`, and hash their contents.

    Args:
        settings: paths and cache folder.
        description: text that identifies all other settings on which the samples depend.
        kinds: file kind by suffix; files with other suffixes are ignored in folders.

    Raises:
        ConfigError: there are no files, they are of several kinds, or a file cannot be read.
    """
    cache_dir = settings.cache_dir
    train = [_find_files(path, PATH, kinds, cache_dir) for path in listed_paths(settings.path)]
    validation = [
        _find_files(path, VALIDATION_PATH, kinds, cache_dir) for path in listed_paths(settings.validation_path)
    ]
    files = [file for source in train for file in source]
    names = [f"{description} {bool(validation)}", *(file.name for file in files)]
    source_kinds = [kinds[suffix_of(source[0])] for source in train]
    if len(train) > 1 or len(validation) > 1:
        names[0] += f" {[len(source) for source in train]} {[len(source) for source in validation]}"
    try:
        hashes = file_digests([*files, *(file for source in validation for file in source)], cache_dir)
    except OSError as error:
        message = f"{error.filename} cannot be read: {error.strerror}; make it readable or leave it out"
        raise ConfigError(Violation(PATH, message)) from error
    fingerprint = _digest(names, hashes)
    content = _digest([names[0], *source_kinds, str(len(files))], hashes)
    return CorpusFiles(train, validation, fingerprint, content)


def _read(
    sources: Sequence[Sequence[Path]],
    validation_sources: Sequence[Sequence[Path]],
    open_documents: Callable[..., Documents],
    held_out: float,
) -> Splits:
    """Open the documents of both splits, and read all of them once to find damaged files early.

    Raises:
        ConfigError: a file cannot be read, the text column is missing, or there is no text.
    """
    train_documents = [open_documents(files, key=PATH) for files in sources]
    progress = ReadingProgress("reading")
    counts, sizes = zip(*(_count(source, PATH, progress) for source in train_documents), strict=True)
    num_bytes = sum(sizes)
    if validation_sources:
        validation_documents = [open_documents(files, key=VALIDATION_PATH) for files in validation_sources]
        num_bytes += sum(_count(source, VALIDATION_PATH, progress)[1] for source in validation_documents)
        validation: list[Iterable[str]] = [*validation_documents]
        splits = [Splits(source, ()) for source in train_documents]
    else:
        splits = [_split(source, count, held_out) for source, count in zip(train_documents, counts, strict=True)]
        validation = [split.validation for split in splits]
    return Splits(
        splits[0].train if len(splits) == 1 else Sources([split.train for split in splits]),
        validation[0] if len(validation) == 1 else Interleaved(validation),
        num_bytes,
    )


def _split(train: Documents, count: int, held_out: float) -> Splits:
    """Split the documents of a source, or the text of its only document."""
    if count == 1:
        text = "".join(train)
        split_index = round(len(text) * (1 - held_out))
        return Splits([text[:split_index]], [text[split_index:]])
    validation_numbers = HeldOutNumbers.choose(count, held_out)
    return Splits(replace(train, exclude=validation_numbers), replace(train, include=validation_numbers))


def _count(source: Documents, key: str, progress: ReadingProgress) -> tuple[int, int]:
    """Return the number of documents and their total bytes.

    Raises:
        ConfigError: there are no documents, or all are empty.
    """
    count, num_filled, size = source.count(progress)
    if not num_filled:
        suffix = f" and {len(source.files) - 1} more" if len(source.files) > 1 else ""
        content = f"{count} documents, all empty" if count else "no rows"
        raise ConfigError(Violation(key, f"{source.files[0]}{suffix}: {content}; give files with text"))
    return count, size


def _find_files(pattern: str, key: str, kinds: Mapping[str, str], cache_dir: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if not pattern.strip():
        raise ConfigError(Violation(key, f"is empty; give a file, folder or glob of {list_suffixes(kinds)} files"))
    try:
        if is_url(pattern):
            files = fetch_files(pattern, key=key, kinds=kinds, cache_dir=cache_dir)
        elif path.is_dir():
            files = sorted(file for file in path.rglob("*") if suffix_of(file) in kinds)
            if any(file.suffix == ".arrow" for file in files):
                files = [file for file in files if file.name not in SAVE_TO_DISK_FILES]
        elif has_magic(pattern):
            files = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
        else:
            files = [path] if path.is_file() else []
        files = [file for file in files if not file.is_dir()]
    except (OSError, ValueError) as error:
        raise ConfigError(Violation(key, f"{pattern!r} cannot be searched: {error}")) from error
    if not files:
        message = f"{pattern!r} has no files; give a file, folder or glob of {list_suffixes(kinds)} files"
        raise ConfigError(Violation(key, message))
    if irregular := [file for file in files if not file.is_file()]:
        raise ConfigError(
            Violation(key, f"{irregular[0]} is not a regular file, or is a broken symlink; remove it or leave it out")
        )
    suffixes = {suffix_of(file) for file in files}
    if len({kinds.get(suffix) for suffix in suffixes}) > 1 or not suffixes <= kinds.keys():
        message = f"{pattern!r} has files of {', '.join(sorted(suffixes))}; choose one kind of {list_suffixes(kinds)}"
        raise ConfigError(Violation(key, message))
    return files


def _digest(names: Iterable[str], hashes: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(["\0".join(names).encode(errors="surrogateescape"), *hashes])).hexdigest()
