"""Copies of a run directory's files into a store; an object that is there already is not copied again."""

import logging
import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import xxhash

from foundry.run_dir.files import open_regular
from foundry.run_dir.lock import LOCK
from foundry.run_dir.mirror.snapshot import FILES, Part, folder_of
from foundry.run_dir.mirror.store import Store, StoreError
from foundry.run_dir.names import CHECKPOINTS, MIRROR

_CHUNK_BYTES = 2**22
_PART_BYTES = 2**26
_MOST_PARTS = 100
"""A file of more parts is copied anew as a whole, so that restoring it takes few requests."""

_NOT_COPIED = frozenset({CHECKPOINTS, LOCK, MIRROR})
_LONGEST_NAME, _LONGEST_PATH = 200, 800
"""Bytes of a file's name and path; stores limit the names of objects, which contain a checksum and the URL's path."""

log = logging.getLogger(__name__)


class Copier:
    """Copies files into a store.

    Attributes:
        bytes: bytes that were copied.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._skipped = store, set[str]()
        self.bytes = 0

    def copy_checkpoint_file(self, file: Path, step: int, size: int, checksum: str) -> Part:
        """Copy a file of a checkpoint, unless its object exists, and return the object.

        Args:
            file: the file.
            step: optimizer step of the checkpoint.
            size: size of the file in the manifest, in bytes.
            checksum: 128-bit XXH3 of the file in the manifest.

        Raises:
            StoreError: the store cannot be read or written.
            OSError: the file cannot be read, or differs from the manifest.
        """
        part = Part(f"{folder_of(step)}/{file.name}.{checksum}", size, checksum)
        if self._store.size(part.object) == size:
            return part
        with open_regular(file, "rb") as stream:
            if _digest(stream, size) != checksum or stream.read(1):
                raise OSError(f"{file} differs from its checksum in the manifest")
        self._store.upload(file, part.object, size)
        self.bytes += size
        return part

    def copy_small_files(
        self,
        run_dir: Path,
        before: Mapping[str, Sequence[Part]],
        excluded: Collection[Path] = (),
        left_out: Collection[str] = (),
    ) -> dict[str, tuple[Part, ...]]:
        """Copy the small files of a run, and return their parts by path in the run directory.

        Of a file that grew since the last copy, only the end is copied.

        Args:
            run_dir: the run directory.
            before: result of the last copy.
            excluded: folders that are not copied, such as a cache of data.
            left_out: names of files that are not copied.

        Raises:
            StoreError: the store cannot be read or written.
        """
        files = dict[str, tuple[Part, ...]]()
        for name in sorted(set(small_files(run_dir, excluded)).difference(left_out)):
            if not _fits_store(name):
                if name not in self._skipped:
                    log.warning("%r is not copied to %s: a store cannot hold its name", name, self._store.url)
                self._skipped.add(name)
                continue
            try:
                with open_regular(run_dir / name, "rb") as stream:
                    files[name] = self._copy_parts(stream, name, before.get(name, ()))
            except StoreError:
                raise
            except OSError:  # deleted or replaced meanwhile: the next copy has the new file
                continue
        return files

    def _copy_parts(self, stream: IO[bytes], name: str, before: Sequence[Part]) -> tuple[Part, ...]:
        size, start = os.fstat(stream.fileno()).st_size, 0
        parts = list[Part]()
        for part in before if len(before) < _MOST_PARTS else ():
            if start + part.bytes > size or _digest(stream, part.bytes) != part.checksum:
                break
            parts.append(part)
            start += part.bytes
        stream.seek(start)
        while start < size or not parts:
            content = stream.read(min(size - start, _PART_BYTES))
            checksum = xxhash.xxh3_128_hexdigest(content)
            parts.append(Part(f"{FILES}/{name}.{checksum}", len(content), checksum))
            if not any(part.object == parts[-1].object for part in before):
                self._store.write(parts[-1].object, content)
                self.bytes += len(content)
            start += len(content)
            if not content:
                break
        return tuple(parts)


def small_files(run_dir: Path, excluded: Collection[Path] = ()) -> Iterator[str]:
    """Yield the paths of a run's files, relative to its directory, except checkpoints, locks and partial files.

    Args:
        run_dir: the run directory.
        excluded: absolute paths of folders to leave out.
    """
    for parent, folders, names in os.walk(run_dir):
        here = Path(parent)
        kept = (name for name in folders if is_small_file((here / name).relative_to(run_dir).as_posix()))
        folders[:] = [name for name in kept if (here / name).resolve() not in excluded]
        for name in names:
            path = here / name
            if not is_small_file(path.relative_to(run_dir).as_posix()):
                continue
            try:
                is_file = stat.S_ISREG(path.lstat().st_mode)
            except OSError:
                continue
            if is_file:
                yield path.relative_to(run_dir).as_posix()


def is_small_file(name: str) -> bool:
    """Return whether a path in a run directory may be that of a small file, which is copied and restored."""
    parts = name.split("/")
    return parts[0] not in _NOT_COPIED and not any(part.endswith(".partial") for part in parts)


def _fits_store(name: str) -> bool:
    """Return whether an object can have the name of a file, and readers accept it as a path."""
    try:
        length = len(name.encode())
    except UnicodeEncodeError:  # a name that is not UTF-8
        return False
    is_long = length > _LONGEST_PATH or len(name.rpartition("/")[2].encode()) > _LONGEST_NAME
    return not is_long and "\\" not in name and name.isprintable()


def _digest(stream: IO[bytes], size: int) -> str:
    """Return the checksum of the next `size` bytes of a stream."""
    digest = xxhash.xxh3_128()
    while size > 0 and (chunk := stream.read(min(size, _CHUNK_BYTES))):
        digest.update(chunk)
        size -= len(chunk)
    return digest.hexdigest()
