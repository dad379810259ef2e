"""Download of files from URLs into the cache with fsspec; afterwards they are read like local files."""

import hashlib
import logging
from collections.abc import Iterator, Mapping
from functools import partial
from glob import has_magic
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from foundry.core.errors import ConfigError, Violation, as_text
from foundry.data.io.cached_folder import cached_folder
from foundry.data.io.files import SAVE_TO_DISK_FILES, list_suffixes, suffix_of
from foundry.data.io.reading_progress import ReadingProgress

_CHUNK_BYTES = 2**20
_METADATA_FILES = {"README.md", "dataset_infos.json", *SAVE_TO_DISK_FILES}
"""Metadata files of a dataset, which are not data."""
log = logging.getLogger(__name__)


def fetch_files(url: str, *, key: str, kinds: Mapping[str, str], cache_dir: str) -> list[Path]:
    """Download the files of a URL into the cache, and return their local paths; a cached URL is not accessed again.

    Args:
        url: URL of a file, a folder or a glob, such as `hf://datasets/OWNER/NAME/*.parquet`.
        key: setting that contains the URL, for error messages.
        kinds: supported suffixes; other files of a folder are ignored.
        cache_dir: parent folder of the cache.

    Raises:
        ConfigError: there are no files, they cannot be downloaded, or the cache cannot be written.
    """
    name = hashlib.sha256(f"remote {sorted(kinds)} {url}".encode(errors="surrogateescape")).hexdigest()[:32]
    folder = cached_folder(cache_dir, name, partial(_fetch, url, key, kinds), contents="files of a URL")
    log.info("reading %s from its local copy %s", url, folder)
    return sorted(file for file in folder.iterdir() if file.name[0].isdigit())


def _fetch(url: str, key: str, kinds: Mapping[str, str], folder: Path) -> tuple[str, ...]:
    """Copy the files into the folder, and return their local names.

    Local names begin with a number, so that they are unique and cannot point outside the folder.
    """
    remote = _Remote(url, key)
    names, local_names = remote.files(kinds), list[str]()
    sizes = [remote.size(name) for name in names]
    known_sizes = [size for size in sizes if size is not None]
    progress = ReadingProgress(f"downloading {url}", sum(known_sizes) if len(known_sizes) == len(sizes) else None)
    for number, name in enumerate(names):
        local_names.append(f"{number:05}-{PurePosixPath(urlsplit(name).path).name}")
        with (folder / local_names[-1]).open("wb") as stream:
            for chunk in progress.over(remote.chunks(name), len):
                stream.write(chunk)
    return tuple(local_names)


class _Remote:
    """Files at a URL; all exceptions of the fsspec file system are converted to `ConfigError`."""

    def __init__(self, url: str, key: str) -> None:
        import fsspec  # type: ignore[import-untyped]

        self._url, self._key = url, key
        try:
            self._system, self._root = fsspec.core.url_to_fs(url)
        except Exception as error:
            raise self._config_error(error) from error

    def files(self, kinds: Mapping[str, str]) -> list[str]:
        """Return the sorted names of the files at the URL; in a folder, only files with a suffix in `kinds`."""
        try:
            if has_magic(self._root):
                names = [str(name) for name in self._system.glob(self._root)]
            elif suffix_of(Path(urlsplit(self._root).path)) in kinds:
                names = [self._root]
            else:
                all_names = [str(name) for name in self._system.find(self._root)]
                names = [name for name in all_names if suffix_of(Path(name)) in kinds]
                names = [name for name in names if PurePosixPath(name).name not in _METADATA_FILES] or names
        except Exception as error:
            raise self._config_error(error) from error
        if not names:
            message = f"{as_text(self._url)} has no files; give a file, folder or glob of {list_suffixes(kinds)} files"
            raise ConfigError(Violation(self._key, message))
        return sorted(names)

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes, or None if the file system does not report it."""
        try:
            size: Any = self._system.info(name).get("size")
        except Exception as error:
            raise self._config_error(error) from error
        return size if isinstance(size, int) else None

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the content of a file in chunks."""
        try:
            with self._system.open(name, "rb") as stream:
                while chunk := stream.read(_CHUNK_BYTES):
                    yield bytes(chunk)
        except Exception as error:
            raise self._config_error(error) from error

    def _config_error(self, error: Exception) -> ConfigError:
        reason = " ".join(str(error).split()) or type(error).__name__
        remedy = "check network and access rights, or download it and give its path"
        return ConfigError(Violation(self._key, f"{as_text(self._url)} cannot be read: {as_text(reason)}; {remedy}"))
