"""Files behind URLs, as fsspec reads them: fetched into the cache once, and files like any others from then on."""

import hashlib
import logging
from collections.abc import Iterator, Mapping
from functools import partial
from glob import has_magic
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from foundry.core.errors import ConfigError, Violation, shown
from foundry.data.io.cached_folder import cached_folder
from foundry.data.io.files import OF_SAVE_TO_DISK, listed_suffixes, suffix_of
from foundry.data.io.reading_progress import ReadingProgress

_CHUNK_BYTES = 2**20
_ABOUT = {"README.md", "dataset_infos.json", *OF_SAVE_TO_DISK}
"""What lies beside the files of a data set and says what they are."""
log = logging.getLogger(__name__)


def fetched(url: str, *, key: str, kinds: Mapping[str, str], cache_dir: str) -> list[Path]:
    """The files of a URL, from the cache or into it; one that is there is not asked for again.

    Args:
        url: of a file, a folder or a glob, as `hf://datasets/OWNER/NAME/*.parquet`.
        key: the setting that names it.
        kinds: the suffixes that are read; of a folder, other files are left out.
        cache_dir: the cache's parent folder.

    Raises:
        ConfigError: nothing is there, it cannot be had, or the cache cannot be written.
    """
    name = hashlib.sha256(f"remote {sorted(kinds)} {url}".encode(errors="surrogateescape")).hexdigest()[:32]
    folder = cached_folder(cache_dir, name, partial(_fetch, url, key, kinds), what="files of a URL")
    log.info("%s is read from %s, where it was copied once", url, folder)
    return sorted(file for file in folder.iterdir() if file.name[0].isdigit())


def _fetch(url: str, key: str, kinds: Mapping[str, str], folder: Path) -> tuple[str, ...]:
    """Copy the files; their names here, which are numbered, so that none is another's or leads elsewhere."""
    remote = _Remote(url, key)
    found, written = remote.files(kinds), list[str]()
    sizes = [remote.size(name) for name in found]
    known = [size for size in sizes if size is not None]
    progress = ReadingProgress(f"fetching {url}", sum(known) if len(known) == len(sizes) else None)
    for number, name in enumerate(found):
        written.append(f"{number:05}-{PurePosixPath(urlsplit(name).path).name}")
        with (folder / written[-1]).open("wb") as stream:
            for chunk in progress.over(remote.chunks(name), len):
                stream.write(chunk)
    return tuple(written)


class _Remote:
    """What lies at a URL; whatever a file system's library raises is a `ConfigError`."""

    def __init__(self, url: str, key: str) -> None:
        import fsspec  # type: ignore[import-untyped]

        self._url, self._key = url, key
        try:
            self._system, self._root = fsspec.core.url_to_fs(url)
        except Exception as error:
            raise self._refusal(error) from error

    def files(self, kinds: Mapping[str, str]) -> list[str]:
        """The names of the files, sorted."""
        try:
            if has_magic(self._root):
                found = [str(name) for name in self._system.glob(self._root)]
            elif suffix_of(Path(urlsplit(self._root).path)) in kinds:
                found = [self._root]
            else:
                listed = [str(name) for name in self._system.find(self._root)]
                found = [name for name in listed if suffix_of(Path(name)) in kinds]
                found = [name for name in found if PurePosixPath(name).name not in _ABOUT] or found
        except Exception as error:
            raise self._refusal(error) from error
        if not found:
            message = f"{shown(self._url)} has no files; give a file, folder or glob of {listed_suffixes(kinds)} files"
            raise ConfigError(Violation(self._key, message))
        return sorted(found)

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where nobody knows."""
        try:
            size: Any = self._system.info(name).get("size")
        except Exception as error:
            raise self._refusal(error) from error
        return size if isinstance(size, int) else None

    def chunks(self, name: str) -> Iterator[bytes]:
        """What a file holds."""
        try:
            with self._system.open(name, "rb") as stream:
                while chunk := stream.read(_CHUNK_BYTES):
                    yield bytes(chunk)
        except Exception as error:
            raise self._refusal(error) from error

    def _refusal(self, error: Exception) -> ConfigError:
        reason = " ".join(str(error).split()) or type(error).__name__
        remedy = "is there a network, and the right to read it? Else fetch it elsewhere and give its path"
        return ConfigError(Violation(self._key, f"{shown(self._url)} cannot be read: {shown(reason)}; {remedy}"))
