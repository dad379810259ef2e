"""Objects under a URL of fsspec; every failure is a `StoreError` with one line that contains no credentials."""

import json
import os
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from foundry.run_dir.files import sync_path
from foundry.run_dir.redact import one_line

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://")
_T = TypeVar("_T")

MAX_OBJECT_BYTES = 2**26
"""Size limit of the objects that are read into memory."""


class StoreError(OSError):
    """A store cannot be reached, read or written; the message is one line without credentials."""

    def __str__(self) -> str:
        return str(self.args[0])


class MissingObjectError(StoreError):
    """An object does not exist."""


class TooLargeError(StoreError):
    """An object is larger than foundry writes one that is read into memory."""


def why_not_a_store(url: str) -> str | None:
    """Return why a text is not the URL of a store, with the remedy; None if it may be one. Accesses no network."""
    if _SCHEME.match(url) is None or "::" in url:
        return "is not a URL; give one such as s3://BUCKET/RUN or file:///FOLDER/RUN"
    if "?" in url or "#" in url:
        return "has a query, which may contain a key; leave it out, and set options in the environment"
    parts = urlsplit(url)
    if "@" in parts.netloc:
        return "has a user name or password; leave them out, and set credentials in the environment"
    if not parts.path.strip("/") and not parts.netloc:
        return "has no path; give one such as s3://BUCKET/RUN or file:///FOLDER/RUN"
    return None


def join(url: str, name: str) -> str:
    """Return the URL of an entry."""
    return f"{url.rstrip('/')}/{name}"


class Store:
    """Reads and writes the objects under a URL. Objects are named relative to the URL, with `/` between folders.

    A new or replaced object appears whole or not at all: object stores guarantee this, and for `file://` the content
    is written to another name first.

    Attributes:
        url: the URL, without credentials.
    """

    def __init__(self, url: str) -> None:
        """Open the file system of a URL, without access to the network.

        Raises:
            StoreError: the file system is unknown, or its package is not installed.
        """
        import fsspec  # type: ignore[import-untyped]

        self.url = url.rstrip("/")
        with self._explained():
            # Listings are not cached, since other processes write to the same store.
            self._system, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        self._root = str(root).rstrip("/")
        self._is_local = "file" in ([kind] if isinstance(kind := self._system.protocol, str) else kind)

    def read(self, name: str) -> bytes:
        """Return the content of a small object.

        Raises:
            MissingObjectError: the object does not exist.
            TooLargeError: the object is larger than `MAX_OBJECT_BYTES`.
            StoreError: the object cannot be read.
        """
        if int(self._call(lambda: self._system.info(self._path(name)))["size"]) > MAX_OBJECT_BYTES:
            raise TooLargeError(f"{join(self.url, name)} is larger than {MAX_OBJECT_BYTES} bytes")
        return bytes(self._call(lambda: self._system.cat_file(self._path(name))))

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a small object.

        Raises:
            MissingObjectError: the object does not exist.
            StoreError: the object cannot be read.
            ValueError: it does not contain a JSON object.
        """
        try:
            content = json.loads(self.read(name))
        except (TooLargeError, RecursionError):
            raise ValueError(f"{name} is not JSON of foundry") from None
        if not isinstance(content, dict):
            raise ValueError(f"{name} contains no JSON object")
        return content

    def size(self, name: str) -> int | None:
        """Return the size of an object in bytes; None if it does not exist.

        Raises:
            StoreError: the store cannot be read.
        """
        try:
            return int(self._call(lambda: self._system.info(self._path(name)))["size"])
        except MissingObjectError:
            return None

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the size of every object below a folder, by its name relative to the folder.

        Raises:
            StoreError: the store cannot be read.
        """
        path = self._path(folder) if folder else self._root
        try:
            entries = self._call(lambda: self._system.find(path, detail=True))
        except MissingObjectError:
            return {}
        start = len(path.lstrip("/")) + 1
        return {
            str(name).lstrip("/")[start:]: int(entry["size"])
            for name, entry in entries.items()
            if not str(name).endswith("/") and len(str(name).lstrip("/")) > start
        }

    def names(self, folder: str) -> list[str]:
        """Return the names of the objects and folders directly in a folder.

        Raises:
            StoreError: the store cannot be read.
        """
        path = self._path(folder) if folder else self._root
        try:
            entries = self._call(lambda: self._system.ls(path, detail=False))
        except MissingObjectError:
            return []
        names = (str(entry).rstrip("/") for entry in entries)
        return sorted({name.rpartition("/")[2] for name in names if name.lstrip("/") != path.lstrip("/")})

    def write(self, name: str, content: bytes) -> None:
        """Write a small object, and check its size.

        Raises:
            StoreError: the object cannot be written.
        """
        with self._whole(name) as path:
            self._call(lambda: self._system.pipe_file(path, content))
        self._require_size(name, len(content))

    def upload(self, file: Path, name: str, size: int) -> None:
        """Copy a file of known size to an object, and check the size of the object.

        Raises:
            StoreError: the object cannot be written.
            OSError: the file cannot be read.
        """
        with self._whole(name) as path:
            self._call(lambda: self._system.put_file(str(file), path))
        self._require_size(name, size)

    def download(self, name: str, file: Path) -> None:
        """Copy an object to a new file.

        Raises:
            MissingObjectError: the object does not exist.
            StoreError: the object cannot be read, or the file cannot be written.
        """
        self._call(lambda: self._system.get_file(self._path(name), str(file)))

    def remove(self, *names: str) -> None:
        """Delete objects; missing objects are ignored.

        Raises:
            StoreError: an object cannot be deleted.
        """
        for name in names:
            with suppress(MissingObjectError):
                self._call(partial(self._system.rm_file, self._path(name)))

    def remove_folder(self, folder: str) -> None:
        """Delete all objects below a folder.

        Raises:
            StoreError: an object cannot be deleted.
        """
        self.remove(*(f"{folder}/{name}" for name in self.sizes(folder)))
        if self._is_local:
            with suppress(StoreError):
                self._call(lambda: self._system.rm(self._path(folder), recursive=True))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _whole(self, name: str) -> Iterator[str]:
        """Yield the path to write an object to; in a local folder a temporary one, which is renamed at the end."""
        path = self._path(name)
        if not self._is_local:
            yield path
            return
        partial = Path(path).with_name(f".{uuid.uuid4().hex}.partial")
        try:
            partial.parent.mkdir(parents=True, exist_ok=True)
            yield str(partial)
            sync_path(partial)
            partial.replace(path)
            sync_path(partial.parent)
        except OSError as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise error if isinstance(error, StoreError) else self._error(error) from error

    def _require_size(self, name: str, size: int) -> None:
        if (actual := self.size(name)) != size:
            raise StoreError(f"{join(self.url, name)} has {actual} bytes after writing {size}")

    def _call(self, work: Callable[[], _T]) -> _T:
        with self._explained():
            return work()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Convert every exception of the file system, whose classes are many, to `StoreError`."""
        try:
            yield
        except FileNotFoundError as error:
            raise MissingObjectError(_reason(error)) from error
        except Exception as error:
            raise self._error(error) from error

    def _error(self, error: Any) -> StoreError:
        return StoreError(_reason(error))


def _reason(error: BaseException) -> str:
    """Return an error of a file system in one line, without secrets of the environment that it may quote."""
    text = one_line(str(error)) or type(error).__name__
    for name, value in os.environ.items():
        if len(value) >= 8 and re.search(r"(?i)secret|token|password|key", name) and value in text:
            text = text.replace(value, "***")
    return text
